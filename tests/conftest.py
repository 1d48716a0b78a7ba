"""Which tests share a process where pytest-xdist has several, and what one file leaves to the next:
nothing."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.ranks import stop_warm_ranks

# Until all tests are imported: looking for garbage among what modules hold takes a quarter of that.
gc.disable()

WHOLE_FOLDERS = ("tests/cluster/", "tests/multiprocess/host_cuda/")
"""Whose tests share a process: there is one Slurm, and one pair of two machines' addresses; and
ranks that have devices take seconds to start."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep a file's tests together, which share what its fixtures made, and those of some
    folders."""
    # `python -m tests.gpu` runs where pytest is alone
    from xdist.scheduler import LoadScopeScheduling

    class FilesTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((folder for folder in WHOLE_FOLDERS if file.startswith(folder)), file)

    return FilesTogether(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs the CUDA device in host memory where this process has none."""
    if "HOST_CUDA_LIBRARY" in os.environ:
        return
    left_out = [item for item in items if item.get_closest_marker("host_cuda")]
    items[:] = [item for item in items if item not in left_out]
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Look for garbage again, but not among what was imported."""
    gc.freeze()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let ranks of tests/multiprocess train on GPUs, or on CUDA devices in host memory."""
    parser.addoption(
        "--accelerator", choices=("cpu", "gpu"), default="cpu", help="what ranks train on"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Tell ranks, which are processes of their own."""
    os.environ["RANKS_ACCELERATOR"] = config.getoption("--accelerator")


OF_RANKS = (
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@pytest.fixture(scope="module", autouse=True)
def _end_ranks_and_group() -> Iterator[None]:
    """Warm ranks, and the process group that trainers of one rank leave, end with the file that has
    made them.

    So do the variables that Lightning's launcher leaves: a script that a later file starts would
    take itself for a rank that somebody else has started, and wait for the others.
    """
    before = {name: os.environ[name] for name in OF_RANKS if name in os.environ}
    yield
    for name in OF_RANKS:
        os.environ.pop(name, None)
    os.environ.update(before)
    stop_warm_ranks()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
