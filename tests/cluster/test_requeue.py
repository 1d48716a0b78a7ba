"""A job that is asked to leave saves, is requeued, and goes on with the losses of one that was
never asked."""

import json
import os
import sys
import time
from typing import Any

import pytest

from tests.support.kills import check_trained, read_trained
from tests.support.launched_script import NUM_SAMPLES
from tests.support.launches import ONE_THREAD, SHELL, Result, on_one_machine, results_of
from tests.support.limits import LIMIT_SECONDS
from tests.support.slurm import Slurm

pytestmark = pytest.mark.cluster


def _went_on(results: list[Result], code: int, is_requeued: bool = False) -> None:
    """Check that two attempts of two ranks are together the run that never stopped.

    is_requeued: Slurm ends the first attempt's processes when rank 0 has the job requeued, maybe
    before rank 1 prints.
    """
    first, second = (
        {r["rank"]: r for r in results if r["attempt"] == attempt} for attempt in (0, 1)
    )
    assert second.keys() == {0, 1}
    assert first.keys() == {0, 1} or (is_requeued and first.keys() == {0})
    assert {r["code"] for r in first.values()} == {code}
    assert {r["code"] for r in second.values()} == {0}
    assert len({len(r["losses"]) for r in first.values()}) == 1, "they left after different steps"
    steps, num_seen = len(first[0]["losses"]), len(first[0]["seen"])
    for rank, expected in enumerate(on_one_machine(2)):
        resumed = second[rank]
        stopped = first.get(rank) or {
            "losses": expected["losses"][:steps],
            "seen": expected["seen"][:num_seen],
        }
        assert 3 <= steps < len(expected["losses"])
        assert stopped["seen"] + resumed["seen"] == expected["seen"]
        assert stopped["losses"] + resumed["losses"] == pytest.approx(expected["losses"], abs=1e-6)
    if len(first) == 2:
        assert sorted(number for r in results for number in r["seen"]) == list(range(NUM_SAMPLES))


def _options(slurm: Slurm, name: str, **options: Any) -> dict[str, str]:
    folder = slurm.folder / name
    folder.mkdir()
    (folder / "hpc_ckpt_7.ckpt").write_text("left by another job")
    return ONE_THREAD | {
        "LAUNCHED_OPTIONS": json.dumps({"default_root_dir": str(folder)} | options)
    }


@pytest.mark.slow
def test_a_requeued_job_goes_on_as_if_it_had_never_stopped(slurm: Slurm) -> None:
    # the second a second later
    options = _options(slurm, "requeued") | {"LAUNCHED_SIGNALS": "SIGUSR1 SIGUSR1"}
    job = slurm.sbatch(f"srun {SHELL}", ["-N2", "--ntasks-per-node=1"], env=options)
    slurm.wait_for_output(job, "Requeued")
    assert slurm.wait(job) == "COMPLETED", slurm.output(job)
    printed = slurm.output(job)
    assert "Restoring states from the checkpoint path" in printed
    _went_on(results_of(printed), 75, is_requeued=True)
    files = os.listdir(slurm.folder / "requeued")
    assert files == ["hpc_ckpt_7.ckpt"], "what has come to its end leaves nothing to go on from"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signal", "code", "output"),
    [
        ("SIGUSR1", 75, "the job is not requeued: scontrol: "),
        ("SIGTERM", 143, "Asked to stop: saving"),
    ],
)
def test_a_job_that_nobody_requeues_ends_with_a_code_and_goes_on_when_it_runs_again(
    slurm: Slurm, signal: str, code: int, output: str
) -> None:
    options = _options(slurm, signal, stopping={"on_sigterm": "checkpoint"})
    # To one rank only. MASTER_ADDR, since scontrol would know the address.
    options |= {"LAUNCHED_SIGNALS": f"no {signal}", "MASTER_ADDR": "127.0.0.1"}
    step = f"srun -N2 -n2 env PATH=/nowhere {SHELL}"
    script = f"{step}; code=$?; echo code $code; [ $code = {code} ] && {step}"
    job = slurm.sbatch(script, ["-N2", "-n2"], env=options)
    assert slurm.wait(job) == "COMPLETED", slurm.output(job)
    printed = slurm.output(job)
    assert f"code {code}" in printed
    assert output in printed
    _went_on(results_of(printed), code)


@pytest.mark.slow
def test_a_job_whose_node_goes_down_is_requeued_and_trains_what_one_trains_that_never_stops(
    slurm: Slurm,
) -> None:
    folder = slurm.folder / "node down"
    folder.mkdir()
    options = ONE_THREAD | {"KILLED_OPTIONS": json.dumps({"pause": 0.1})}
    script = f"srun {sys.executable} -m tests.support.killed_script '{folder}'"
    job = slurm.sbatch(script, ["-N2", "--ntasks-per-node=1", "--requeue"], env=options)
    slurm.wait_for_output(job, "started by Slurm")
    deadline = time.monotonic() + LIMIT_SECONDS
    while max(read_trained(folder).last_steps.values(), default=0) < 17:
        assert time.monotonic() < deadline, slurm.output(job)
        time.sleep(0.05)
    # its slurmd soon returns it to service
    slurm.scontrol("update", "nodename=node2", "state=down", "reason=test")
    slurm.wait(job, ["PENDING"])
    assert slurm.wait(job) == "COMPLETED", slurm.output(job)
    trained = read_trained(folder, slurm.output(job))
    check_trained(trained, folder, allowed=1e-6)
    assert trained.first_steps.keys() == {0, 1}
    assert 15 <= trained.first_steps[1] <= trained.last_steps[0] + 1
    assert "Restarted (Slurm, step" in trained.printed
