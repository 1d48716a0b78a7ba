"""What the tests of this folder share: one Slurm, started by the first that asks for it."""

from collections.abc import Iterator

import pytest

from tests.support.slurm import Slurm, require_slurm


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
