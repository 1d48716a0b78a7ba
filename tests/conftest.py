"""Which tests share a process where pytest-xdist has several, and what one file leaves to the next: nothing."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from xdist.scheduler import LoadScopeScheduling


class FilesTogether(LoadScopeScheduling):
    """A file's tests share what its fixtures made. There is one Slurm, and one pair of two machines' addresses."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "tests/cluster" if file.startswith("tests/cluster/") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesTogether:
    """Hand tests out so."""
    return FilesTogether(config, log)


@pytest.fixture(scope="module", autouse=True)
def _leave_no_group() -> Iterator[None]:
    """Trainers of one rank leave a process group in the tests' own process, which the next file must not find."""
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
