"""What a process is in Slurm, by the variables that Slurm 22.05 was seen to set; tests/cluster asks
the real one."""

from typing import Any

import pytest

from lightning_distrec.cluster import slurm
from lightning_distrec.cluster.slurm import (
    expand_counts,
    expand_hosts,
    in_step,
    read_srun,
    refuse_lone_script,
)
from lightning_distrec.errors import ConfigError

Variables = dict[str, str]


def _task(rank: int = 0, **changes: Any) -> Variables:
    """Return the variables of `srun -N2 -n3`, rank 0, 1 or 2."""
    node = int(rank == 2)
    fields = {
        "JOB_ID": 3,
        "STEP_ID": 0,
        "STEP_NODELIST": "node[1-2]",
        "STEP_NUM_NODES": 2,
        "STEP_NUM_TASKS": 3,
        "STEP_TASKS_PER_NODE": "2,1",
        "NODELIST": "node[1-2]",
        "NNODES": 2,
        "NTASKS": 3,
        "TASKS_PER_NODE": "2,1",
        "GTIDS": ("0,1", "2")[node],
        "PROCID": rank,
        "LOCALID": (0, 1, 0)[rank],
        "NODEID": node,
    } | changes
    return {f"SLURM_{name}": str(value) for name, value in fields.items() if value is not None}


def _alone(**changes: Any) -> Variables:
    """Return the variables of `srun -n1`."""
    fields = {
        "STEP_NODELIST": "node1",
        "STEP_NUM_NODES": 1,
        "STEP_NUM_TASKS": 1,
        "STEP_TASKS_PER_NODE": "1",
    }
    return _task(
        **(fields | {"NNODES": 1, "NTASKS": 1, "TASKS_PER_NODE": "1", "GTIDS": "0"} | changes)
    )


STEP = dict.fromkeys((
    "STEP_ID",
    "STEP_NODELIST",
    "STEP_NUM_NODES",
    "STEP_NUM_TASKS",
    "STEP_TASKS_PER_NODE",
))
NO_TASKS: dict[str, Variables] = {
    "no Slurm": {},
    "a batch script": _task(**STEP, GTIDS="0"),
    "a shell of salloc": _task(**STEP, GTIDS=None, PROCID=None, LOCALID=None, NODEID=None),
    "an interactive step": _task(
        STEP_ID=4294967290,
        STEP_NODELIST="node1",
        STEP_NUM_TASKS=1,
        STEP_TASKS_PER_NODE="1",
        NTASKS=4,
        GTIDS="0",
    ),
    "srun --pty bash": _alone(PTY_PORT=40375),
    "a script submitted in a step of other numbers": _task(
        STEP_NODELIST="node1",
        STEP_NUM_NODES=1,
        STEP_NUM_TASKS=2,
        STEP_TASKS_PER_NODE="2",
        GTIDS="0",
        NTASKS=2,
    ),
    "a script submitted in a step of the same numbers": _task(GTIDS="0"),
}


def test_what_srun_has_not_started_is_no_task() -> None:
    for name, variables in NO_TASKS.items():
        assert not in_step(variables), name
        assert read_srun(variables) is None, name


@pytest.fixture
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let names lead to addresses without asking anybody."""
    monkeypatch.setattr(slurm, "_find_address", lambda node: f"{node}.address")


@pytest.mark.usefixtures("_names")
def test_a_task_is_recognised_by_its_step() -> None:
    launched = [read_srun(_task(rank)) for rank in range(3)]
    assert [(task.rank, task.num_ranks, task.local_rank) for task in launched] == [
        (0, 3, 0),
        (1, 3, 1),
        (2, 3, 0),
    ]
    assert [(task.node, task.num_nodes, task.local_num_ranks) for task in launched] == [
        (0, 2, 2)
    ] * 2 + [(1, 2, 1)]
    assert {task.nodes for task in launched} == {("node1", "node1", "node2")}
    assert len({task.point for task in launched}) == 1
    assert launched[0].point.host == "node1.address"


@pytest.mark.usefixtures("_names")
@pytest.mark.parametrize("distribution", ["cyclic", None], ids=["said", "as the cluster is set up"])
def test_ranks_that_are_dealt_out_in_turn_are_named_so(distribution: str | None) -> None:
    launched = read_srun(_task(GTIDS="0,2", DISTRIBUTION=distribution))
    assert launched.nodes == ("node1", "node2", "node1")


@pytest.mark.usefixtures("_names")
def test_an_order_that_is_not_known_is_not_made_up() -> None:
    assert read_srun(_task(GTIDS="1,2", DISTRIBUTION="plane")).nodes == ()
    with pytest.raises(ConfigError, match="the node of rank 0 is unknown. Set MASTER_ADDR"):
        read_srun(_task(DISTRIBUTION="arbitrary"))
    assert read_srun(_task(DISTRIBUTION="arbitrary") | {"MASTER_ADDR": "here"}).point.host == "here"


@pytest.mark.usefixtures("_names")
def test_no_two_steps_or_attempts_share_an_identity() -> None:
    tasks = [
        _task(),
        _task(JOB_ID=4),
        _task(STEP_ID=1),
        _task(RESTART_COUNT=1),
        _task(STEP_NODELIST="node[3-4]"),  # of another component of a heterogeneous job
    ]
    points = [read_srun(environ).point for environ in tasks]
    assert len({point.identity for point in points}) == len(points)
    assert len({point.ports for point in points}) == len(points)
    assert all(20_000 <= port < 30_000 for point in points for port in point.ports)


def test_only_scripts_of_several_nodes_must_use_srun() -> None:
    refuse_lone_script({})
    refuse_lone_script(_alone(**STEP))
    with pytest.raises(ConfigError, match=r"Slurm gave this job 2 nodes.*`srun python \.\.\.`"):
        refuse_lone_script(_task(**STEP))


def test_counts_and_host_lists_are_expanded() -> None:
    assert expand_counts("4(x2),1,2(x2)") == [4, 4, 1, 2, 2]
    with pytest.raises(ConfigError, match="SLURM_STEP_TASKS_PER_NODE=2x3 cannot be parsed"):
        expand_counts("2x3")
    assert expand_hosts("a,b[08-10],c") == ["a", "b08", "b09", "b10", "c"]
    racks = ["rack1n05", "rack1n07", "rack2n05", "rack2n07"]
    assert expand_hosts("rack[1-2]n[05,07]") == racks


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"STEP_NODELIST": "node1", "NODELIST": "node1"},
            r"SLURM_STEP_NODELIST=node1, SLURM_STEP_TASKS_PER_NODE=2,1 ",
        ),
        (
            {"STEP_TASKS_PER_NODE": "3", "TASKS_PER_NODE": "3"},
            r"LIST=node\[1-2\], SLURM_STEP_TASKS_PER_NODE=3 ",
        ),
        ({"NODEID": 2}, r"SLURM_NODEID=2 .*srun"),
    ],
)
def test_lists_of_nodes_that_do_not_fit_are_refused_with_their_values(
    changes: Variables, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_srun(_task(**changes))
