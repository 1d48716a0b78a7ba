"""Open MPI's mpirun, and processes with a PyTorchJob's variables: the same samples and losses as on one machine."""

import pytest

from tests.support.debian import require
from tests.support.launches import SCRIPT, check, ended, results_of, start
from tests.support.ports import free_port

pytestmark = pytest.mark.cluster


@pytest.mark.slow
def test_mpirun_sets_the_ranks() -> None:
    require(["mpirun"], ["openmpi-bin"])
    out, err = ended(start("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", *SCRIPT))
    check(results_of(out), [2])
    assert "started by mpirun" in err + out


@pytest.mark.slow
def test_a_pytorchjob_is_one_rank_for_each_pod() -> None:
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    out, _ = ended(*(start(*SCRIPT, RANK=str(rank), **job) for rank in range(2)))
    check(results_of(out), [1, 1])
