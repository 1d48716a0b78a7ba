"""The Slurm of these tests is a real one: it runs ranks on two nodes, kills, requeues, and leaves
nothing behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.limits import LIMIT_SECONDS
from tests.support.parameters import slow_except
from tests.support.slurm import Slurm, SlurmFailed, require_slurm

pytestmark = pytest.mark.cluster

WHERE = ["bash", "-c", "echo $SLURM_PROCID $SLURM_LOCALID $SLURMD_NODENAME"]


def test_srun_starts_four_ranks_on_two_nodes(slurm: Slurm) -> None:
    done = slurm.srun(["-N2", "--ntasks-per-node=2"], WHERE)
    assert sorted(done.stdout.splitlines()) == ["0 0 node1", "1 1 node1", "2 0 node2", "3 1 node2"]
    assert (done.returncode, done.stderr) == (0, "")


def test_three_ranks_are_spread_unequally_over_two_nodes(slurm: Slurm) -> None:
    done = slurm.srun(["-N2", "-n3"], WHERE)
    assert sorted(done.stdout.splitlines()) == ["0 0 node1", "1 1 node1", "2 0 node2"]


def test_a_batch_job_runs_its_script_on_the_first_node_and_its_steps_on_both(slurm: Slurm) -> None:
    job = slurm.sbatch(
        "echo script on $SLURMD_NODENAME\nsrun bash -c 'echo step on $SLURMD_NODENAME'", ["-N2"]
    )
    assert slurm.wait(job) == "COMPLETED"
    assert sorted(slurm.output(job).splitlines()) == [
        "script on node1",
        "step on node1",
        "step on node2",
    ]


def test_a_command_in_an_allocation_runs_on_none_of_its_nodes(slurm: Slurm) -> None:
    done = slurm.salloc(
        ["-N2"],
        ["bash", "-c", "echo here: $SLURM_NNODES, $SLURMD_NODENAME; srun printenv SLURMD_NODENAME"],
    )
    host, *nodes = done.stdout.splitlines()
    assert (host, sorted(nodes)) == ("here: 2,", ["node1", "node2"])


@pytest.mark.slow
def test_a_requeued_job_begins_again_and_counts_its_restarts(slurm: Slurm) -> None:
    job = slurm.sbatch(
        "srun bash -c 'echo restarts: ${SLURM_RESTART_COUNT-none}; [ $SLURM_RESTART_COUNT ] || "
        "sleep 60'"
    )
    slurm.wait_for_output(job, "restarts: none")
    slurm.scontrol("requeue", str(job))
    assert slurm.wait(job) == "COMPLETED"
    assert slurm.output(job).splitlines()[-1] == "restarts: 1"


@pytest.mark.slow
def test_a_job_ends_when_one_of_its_ranks_is_killed(slurm: Slurm) -> None:
    command = "if [ $SLURM_PROCID = 3 ]; then kill -9 $$; fi; sleep 600"
    began = time.monotonic()
    done = slurm.srun(["-N2", "-n4", "--kill-on-bad-exit=1"], ["bash", "-c", command])
    assert time.monotonic() - began < 120
    # the greatest of all ranks: the others get a SIGTERM
    assert done.returncode in (128 + 9, 128 + 15)
    assert "task 3: Killed" in done.stderr


def test_what_launched_the_tests_is_hidden_from_the_jobs(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "3")
    monkeypatch.setenv("RANK", "1")
    done = slurm.run("env", env={"SLURM_JOB_NAME": "bash"})
    seen = {line.partition("=")[0] for line in done.stdout.splitlines()}
    assert seen >= {"SLURM_CONF", "SLURM_JOB_NAME", "PATH"}
    assert not seen & {"SLURM_NTASKS", "RANK"}


@pytest.mark.slow
def test_what_takes_too_long_is_cancelled_and_reported_with_the_logs(slurm: Slurm) -> None:
    for launch in (slurm.srun, slurm.salloc):
        with pytest.raises(
            SlurmFailed, match=r"waited 6 s for s\w+ bash(?s:.)*begun(?s:.)*log of slurmctld"
        ):
            launch([], ["bash", "-c", "echo begun; sleep 600"], timeout_seconds=6)
    slurm.cancel_all()
    job = slurm.sbatch("echo begun; sleep 600")
    slurm.wait_for_output(job, "begun")
    with pytest.raises(
        SlurmFailed, match=r"waited 1 s for job \d+ to be DONE(?s:.)*JobState=RUNNING(?s:.)*begun"
    ):
        slurm.wait(job, ["DONE"], timeout_seconds=1)


# Shells that only SIGKILL ends, and a process in a session of its own.
STUBBORN = """
import os
from tests.support.limits import LIMIT_SECONDS
from tests.support.slurm import Slurm
with Slurm() as slurm:
    job = slurm.sbatch("trap '' TERM; setsid sleep 1000 & srun -n2 sleep 1000", ["-N2"])
    step = slurm.start("srun", "-n2", "bash", "-c", "trap '' TERM; echo; sleep 1000")
    step.stdout.readline()
    slurm.wait(job, ["RUNNING"])
    print(slurm.folder, flush=True)
    {end}
"""


@pytest.mark.parametrize(
    "end",
    slow_except(
        ["os.kill(os.getpid(), 9)"], ["pass", "raise KeyboardInterrupt", "os.kill(os.getpid(), 9)"]
    ),
)
def test_nothing_is_left_running(end: str) -> None:
    require_slurm()
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", STUBBORN.format(end=end)],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
    )
    folder = done.stdout.decode().strip()
    assert folder.startswith("/tmp/slurm-")
    deadline = time.monotonic() + LIMIT_SECONDS
    while folder in (remaining := _everything_running()) or Path(folder).exists():
        assert time.monotonic() < deadline, remaining  # after a SIGKILL it takes a moment
        time.sleep(0.1)


def _everything_running() -> str:
    every = ["ps", "-eo", "pid,ppid,stat,args", "e", "-ww"]  # with their environment
    return subprocess.run(every, stdout=subprocess.PIPE, text=True, check=True).stdout
