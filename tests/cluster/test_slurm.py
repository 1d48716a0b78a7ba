"""`Trainer(strategy="torchrec_sharded")`, with neither devices nor nodes, however Slurm starts the
program.

What is compared with are as many ranks on one machine, under Lightning's own launcher: the same
samples, the same losses.
"""

import json
import os
import re

import pytest

from tests.support.launched_script import NUM_SAMPLES
from tests.support.launches import ONE_THREAD, SCRIPT, SHELL, check, results_of
from tests.support.slurm import Slurm

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

IN_STEPS: dict[str, tuple[list[str], list[str], list[int]]] = {
    "-n3 over two nodes": (["-N2", "-n3"], SCRIPT, [2, 1]),
    "a shell, whose job is called bash": (["-n2"], ["bash", "-c", SHELL], [2]),
    "a terminal": (["-n2", "--pty"], SCRIPT, [2]),
    "one rank": (["-n1"], SCRIPT, [1]),
}


def test_ranks_use_the_cpus_they_were_given(slurm: Slurm) -> None:
    cpus = len(os.sched_getaffinity(0))
    for arguments, expected in ((["-n1"], cpus), (["-n1", "-c1"], 1)):
        done = slurm.srun(arguments, ["env", "-u", "OMP_NUM_THREADS", *SCRIPT])
        assert [result["threads"] for result in results_of(done.stdout)] == [expected], done.stderr[
            -3000:
        ]


@pytest.mark.parametrize("case", IN_STEPS)
def test_a_step_is_counted_as_slurm_counts_it(slurm: Slurm, case: str) -> None:
    arguments, command, per_node = IN_STEPS[case]
    done = slurm.srun(arguments, command, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr[-3000:]
    results = results_of(done.stdout)
    check(results, per_node)
    assert {result["environment"] for result in results} == {"SlurmRanks"}


def _batch(slurm: Slurm, script: str, arguments: list[str], **environ: str) -> str:
    job = slurm.sbatch(script, arguments, env=ONE_THREAD | environ)
    state = slurm.wait(job)
    printed = slurm.output(job)
    assert state == "COMPLETED", printed
    return printed


def test_two_steps_at_the_same_time_never_meet(slurm: Slurm) -> None:
    steps = "\n".join(f"srun -N2 -n2 --exact {SHELL} > step{step}.out 2>&1 &" for step in "ab")
    _batch(slurm, f"{steps}\nwait", ["-N2", "--ntasks-per-node=2"])
    for step in "ab":
        check(results_of((slurm.folder / f"step{step}.out").read_text()), [1, 1])


def test_a_step_over_the_groups_of_a_heterogeneous_job_is_one_training(slurm: Slurm) -> None:
    done = slurm.srun(["-n2", *SCRIPT, ":", "-n1"], SCRIPT, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr[-3000:]
    check(results_of(done.stdout), [2, 1])


def test_ranks_in_an_order_of_the_users_own_meet_where_the_first_is(slurm: Slurm) -> None:
    hostfile = slurm.folder / "hosts"
    hostfile.write_text("node2\nnode1\n")
    environment = ONE_THREAD | {"SLURM_HOSTFILE": str(hostfile)}
    done = slurm.srun(["-N2", "-n2", "-m", "arbitrary"], SCRIPT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    results = results_of(done.stdout)
    assert [(result["rank"], result["host"]) for result in results] == [(0, "node2"), (1, "node1")]
    assert sorted(number for result in results for number in result["seen"]) == list(
        range(NUM_SAMPLES)
    )


def test_a_batch_script_of_one_node_starts_its_own_ranks(slurm: Slurm) -> None:
    printed = _batch(slurm, SHELL, ["-N1", "-n2"], LAUNCHED_OPTIONS=json.dumps({"devices": 2}))
    results = results_of(printed)
    check(results, [2])
    assert {result["environment"] for result in results} == {"LightningEnvironment"}


def test_a_batch_script_of_two_nodes_without_srun_is_refused_with_the_way_out(slurm: Slurm) -> None:
    job = slurm.sbatch(SHELL, ["-N2", "--ntasks-per-node=2"], env=ONE_THREAD)
    assert slurm.wait(job) == "FAILED"
    printed = slurm.output(job)
    assert (
        "ConfigError: Slurm gave this job 2 nodes, and this process was started on one of them "
        "alone" in printed
    )
    assert "srun python" in printed
    assert not results_of(printed)


def test_more_devices_than_the_step_has_ranks_are_refused(slurm: Slurm) -> None:
    done = slurm.srun(
        ["-n1"], SCRIPT, env=ONE_THREAD | {"LAUNCHED_OPTIONS": json.dumps({"devices": 2})}
    )
    assert done.returncode == 1
    output = r"ConfigError: Trainer\(devices=2\), but Slurm, step \d+\.0 started 1 ranks on node 0"
    assert re.search(output, done.stderr), done.stderr[-2000:]
