"""Ranks that torchrun, mpirun and Kubernetes start."""

import os
import subprocess
import sys

import pytest

from tests.support.debian import require
from tests.support.launches import SCRIPT, check, ended, results_of, start
from tests.support.limits import at_most
from tests.support.ports import free_port

pytestmark = pytest.mark.cluster

KILLS = int(os.environ.get("DISTREC_RESTARTS", "1"))


def _agent(*arguments: str, **environ: str) -> "subprocess.Popen[str]":
    return start(sys.executable, "-m", "torch.distributed.run", *arguments, *SCRIPT[1:], **environ)


@pytest.mark.slow
def test_agents_may_have_unequal_numbers_of_ranks() -> None:
    together = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-id=unequal")
    out, _ = ended(*(_agent(*together, f"--nproc-per-node={ranks}") for ranks in (2, 1)))
    results = results_of(out)
    sizes = [int(result["published"]["LOCAL_WORLD_SIZE"]) for result in results]
    check(results, [2, 1] if sizes == [2, 2, 1] else [1, 2])  # whichever agent came first


@pytest.mark.slow
@pytest.mark.timeout(at_most(10 * KILLS))
def test_every_attempt_after_a_kill_starts_over() -> None:
    agent = _agent("--standalone", "--nproc-per-node=2", f"--max-restarts={KILLS}", LAUNCHED_KILLS=str(KILLS))
    out, _ = ended(agent, timeout_seconds=at_most(KILLS))
    results = results_of(out)
    check(results, [2])
    assert {result["attempt"] for result in results} == {KILLS}


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
