"""Which tests share a process: those of a file, which share what its fixtures made, and all of tests/cluster."""

from pathlib import Path

import pytest

CLUSTER = Path(__file__).parent / "cluster"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Name the group of each test for pytest-xdist. There is one Slurm, and one pair of addresses of two machines."""
    for item in items:
        group = "cluster" if CLUSTER in item.path.parents else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))
