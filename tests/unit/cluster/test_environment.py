"""What the Trainer was given, compared with what was launched; and launchers other than Slurm."""

import pytest

from lightning_distrec.cluster.environment import check_numbers, check_variables
from lightning_distrec.cluster.launched import (
    Launched,
    MeetingPoint,
    Place,
    find_nodes,
    read_open_mpi,
    read_torchrun,
    read_variables,
)
from lightning_distrec.errors import ConfigError

TWO_NODES = Launched("srun", 1, 8, 1, 4, 0, 2, MeetingPoint("a", (1,), "b"))


def test_numbers_that_agree_or_say_nothing_pass() -> None:
    for devices, available, nodes in ((1, 1, 1), (4, 1, 2), (4, 4, 1), (1, 8, 2)):
        check_numbers(TWO_NODES, devices, available, nodes)


def test_other_numbers_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"Trainer\(devices=2\), but srun started 4 ranks on node 0"
    ):
        check_numbers(TWO_NODES, 2, 1, 2)
    with pytest.raises(
        ConfigError, match=r"Trainer\(num_nodes=3\), but srun started ranks on 2 nodes"
    ):
        check_numbers(TWO_NODES, 4, 4, 3)


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
    assert read_torchrun(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}).job == "", (
        "all that have no name are called so"
    )
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


BY_HAND = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}


def test_without_a_local_rank_each_rank_is_a_node_as_in_a_pytorchjob() -> None:
    launched = read_variables(BY_HAND)
    assert (launched.rank, launched.num_ranks, launched.local_num_ranks, launched.num_nodes) == (
        1,
        3,
        1,
        3,
    )
    assert launched.place == Place(None, None, None, launched.place.host, launched.place.machine)
    assert find_nodes([launched.place] * 3) == [0, 1, 2]
    lightnings_own = BY_HAND | {"LOCAL_RANK": "1", "NODE_RANK": "0"}
    del lightnings_own["RANK"]
    assert read_variables(lightnings_own) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"WORLD_SIZE": None},
            "RANK=1 is set, but not WORLD_SIZE. Set RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT "
            "and L",
        ),
        (
            {"MASTER_ADDR": None, "MASTER_PORT": None},
            "RANK=1 is set, but not MASTER_ADDR, MASTER_PORT",
        ),
        ({"RANK": "3"}, "RANK=3 and WORLD_SIZE=3: ranks are numbered from 0"),
        ({"LOCAL_RANK": "first"}, "LOCAL_RANK is first"),
        (
            {"NODE_RANK": "0", "GROUP_RANK": "1"},
            "NODE_RANK=0 and GROUP_RANK=1 of rank 1: unset one",
        ),
    ],
)
def test_variables_of_one_process_that_contradict_each_other_are_refused(
    changes: dict[str, str | None], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_variables({
            name: value for name, value in (BY_HAND | changes).items() if value is not None
        })


def _places(
    local_ranks: str, nodes: str = "", hosts: str = "", local_sizes: str = ""
) -> list[Place]:
    """Return places by a letter for each rank: "-" or no letters where a variable is not set."""

    def read(digits: str, rank: int) -> int | None:
        return int(digits[rank]) if digits and digits[rank] != "-" else None

    rows = enumerate(hosts or "a" * len(local_ranks))
    return [
        Place(read(local_ranks, r), read(nodes, r), read(local_sizes, r), f"host-{h}", h)
        for r, h in rows
    ]


@pytest.mark.parametrize(
    ("places", "nodes"),
    [
        (_places("012"), [0, 0, 0]),
        (_places("0101", hosts="aabb"), [0, 0, 1, 1]),
        (_places("0011", hosts="abab"), [0, 1, 0, 1]),
        (_places("1002", nodes="1011", local_sizes="3133", hosts="abaa"), [1, 0, 1, 1]),
        (_places("001", nodes="011"), [0, 1, 1]),
    ],
    ids=["one host", "two hosts", "in turns", "NODE_RANK", "two nodes on one host"],
)
def test_ranks_share_the_node_that_they_name_or_are_on(
    places: list[Place], nodes: list[int]
) -> None:
    assert find_nodes(places) == nodes


@pytest.mark.parametrize(
    ("places", "message"),
    [
        (
            _places("00"),
            r"LOCAL_RANK is 0, 0 for rank 0, 1 on host-a: number .* and set NODE_RANK if",
        ),
        (_places("01", hosts="ab"), "LOCAL_RANK is 1 for rank 1 on host-b"),
        (_places("0-2"), "LOCAL_RANK is not set for rank 1, but for others"),
        (_places("00", nodes="0-"), "NODE_RANK is not set for rank 1"),
        (_places("00", nodes="12"), "NODE_RANK is 1, 2 on 2 nodes: number them from 0"),
        (
            _places("01", nodes="00", hosts="ab"),
            "NODE_RANK=0 for rank 0, 1, which are on different machines",
        ),
        (
            _places("01", local_sizes="24"),
            "LOCAL_WORLD_SIZE=4 for rank 1, but its node has 2: rank 0, 1 on host-a",
        ),
    ],
)
def test_variables_of_several_ranks_that_contradict_each_other_are_refused(
    places: list[Place], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        find_nodes(places)


def test_a_local_rank_alone_must_fit_the_trainers_numbers() -> None:
    check_variables({"LOCAL_RANK": "1"}, num_devices=2, num_nodes=2)
    check_variables({"LOCAL_RANK": "1", "WORLD_SIZE": "4"}, num_devices=2, num_nodes=2)
    with pytest.raises(
        ConfigError, match=r"LOCAL_RANK=0 and WORLD_SIZE=2, but Trainer\(num_nodes=1, devices=1\)"
    ):
        check_variables({"LOCAL_RANK": "0", "WORLD_SIZE": "2"}, num_devices=1, num_nodes=1)
    with pytest.raises(
        ConfigError,
        match=r"LOCAL_RANK=1, but .* RANK is not set. Set RANK, WORLD_SIZE, MASTER_ADDR",
    ):
        check_variables({"LOCAL_RANK": "1"}, num_devices=1, num_nodes=1)
