"""Which tests share a process where pytest-xdist has several: those of a file, and all of tests/cluster."""

from typing import Any

import pytest
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
