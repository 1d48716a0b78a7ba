"""What the tests of this folder share: one Slurm, started by the first that asks for it, and two
machines."""

from collections.abc import Iterator

import pytest

from tests.support.debian import require
from tests.support.slurm import Slurm, require_slurm
from tests.support.two_machines import Machine, NoMachines, two_machines


@pytest.fixture(scope="session")
def _slurm_of_the_session() -> Iterator[Slurm]:
    require_slurm()
    with Slurm() as slurm:
        yield slurm


@pytest.fixture
def slurm(_slurm_of_the_session: Slurm) -> Iterator[Slurm]:
    """A Slurm with two nodes of four CPUs, without jobs."""
    yield _slurm_of_the_session
    _slurm_of_the_session.cancel_all()


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    """Two machines that only one network joins."""
    require(["ip"], ["iproute2"])
    try:
        with two_machines() as pair:
            yield pair
    except NoMachines as reason:
        pytest.skip(f"no network namespaces: {reason}")
