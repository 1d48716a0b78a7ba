"""What the Trainer was given, compared with what was launched; and launchers other than Slurm."""

from dataclasses import replace

import pytest

from lightning_distrec.cluster.environment import check_numbers
from lightning_distrec.cluster.launched import Launched, read_open_mpi, read_pytorchjob, read_torchrun
from lightning_distrec.cluster.rendezvous import MeetingPoint
from lightning_distrec.errors import ConfigError

TWO_NODES = Launched("srun", 1, 8, 1, 4, 0, 2, MeetingPoint("a", (1,), "b"))


@pytest.mark.parametrize(
    ("devices", "available", "nodes"),
    [(1, 1, 1), (4, 1, 2), (4, 4, 1), (1, 8, 2)],
    ids=["nothing said", "the same said", "all devices", "one device visible"],
)
def test_numbers_that_agree_or_say_nothing_pass(devices: int, available: int, nodes: int) -> None:
    check_numbers(TWO_NODES, devices, available, nodes)


def test_other_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Trainer\(devices=2\), but srun started 4 ranks on node 0"):
        check_numbers(TWO_NODES, 2, 1, 2)
    with pytest.raises(ConfigError, match=r"Trainer\(num_nodes=3\), but srun started ranks on 2 nodes"):
        check_numbers(TWO_NODES, 4, 4, 3)


def test_idle_devices_are_reported_once() -> None:
    with pytest.warns(UserWarning, match="4 ranks on a node with 8 devices: 4 stay idle"):
        check_numbers(replace(TWO_NODES, rank=0), 8, 8, 1)


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "abc/1",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "RANK": "2",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}


def test_torchrun_gives_all_and_hosts_the_meeting() -> None:
    launched = read_torchrun(TORCHRUN)
    assert launched == Launched(
        "torchrun",
        rank=2,
        num_ranks=3,
        local_rank=0,
        local_num_ranks=1,
        node=1,
        num_nodes=2,
        point=MeetingPoint("node1", (29500,), "torchrun abc/1", is_hosted=True),
        job="torchrun-abc_1",
        attempt=2,
    )
    assert read_torchrun(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}).job == "", "all that have no name are called so"
    assert read_torchrun({}) is None
    with pytest.raises(ConfigError, match="WORLD_SIZE is three: .* must be a number"):
        read_torchrun(TORCHRUN | {"WORLD_SIZE": "three"})


def test_open_mpi_needs_an_address_for_several_nodes() -> None:
    environ = {"RANK": "2", "SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "2"}
    environ = {f"OMPI_COMM_WORLD_{name}": value for name, value in environ.items()}
    with pytest.raises(ConfigError, match="mpirun -x MASTER_ADDR=node1"):
        read_open_mpi(environ)
    launched = read_open_mpi(environ | {"MASTER_ADDR": "node1"})
    assert (launched.rank, launched.num_ranks, launched.node, launched.num_nodes) == (2, 4, 1, 2)
    assert read_open_mpi(environ | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}).point.host == "127.0.0.1"
    assert read_open_mpi({}) is None


def test_variables_of_a_pytorchjob_and_of_lightnings_own_launcher_are_distinguished() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
    launched = read_pytorchjob(environ)
    assert (launched.rank, launched.num_ranks, launched.local_num_ranks, launched.num_nodes) == (1, 3, 1, 3)
    assert read_pytorchjob(environ | {"LOCAL_RANK": "1"}) is None
    assert read_pytorchjob({name: value for name, value in environ.items() if name != "RANK"}) is None
