"""Ranks with a CUDA device in host memory each, which stay for the tests of this folder."""

from collections.abc import Iterator

import pytest

from tests.support.host_cuda.runs import DeviceRanks, device_ranks


@pytest.fixture(scope="package")
def devices() -> Iterator[DeviceRanks]:
    """Two ranks."""
    with device_ranks(2) as ranks:
        yield ranks
