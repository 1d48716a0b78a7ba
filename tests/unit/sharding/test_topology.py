"""What torchrec's planner is told of ranks, nodes and memory."""

from pathlib import Path

import torch
from torchrec.distributed.planner import Topology

from lightning_distrec.host_memory import cgroup_limits, free_in_cgroups
from lightning_distrec.sharding.planning.bandwidths import AssumedBandwidths, bandwidth_request
from lightning_distrec.sharding.planning.topology import RankMemory, make_topology
from lightning_distrec.sharding.sharding_groups import NodeLayout

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ROWS, DIM, BATCH = 1000, 16, 512


def bandwidths(**inputs: str) -> AssumedBandwidths:
    return bandwidth_request(dict(inputs), {}).with_measured({}, "cuda")


def topology(
    places: NodeLayout, device: torch.device = CPU, memory: tuple[int, ...] = (), **inputs: str
) -> Topology:
    memory = memory or (10**9,) * places.num_ranks
    host = (10**10 if device.type == "cuda" else 0,) * places.num_ranks
    return make_topology(
        device, places, RankMemory(device_bytes=memory, host_bytes=host), bandwidths(**inputs)
    )


def test_nodes_are_those_that_ranks_name() -> None:
    alike = NodeLayout.gathered([(0, 2), (0, 2), (1, 2), (1, 2)])
    assert alike == NodeLayout.from_node_sizes(2, 2)
    assert alike.alike
    unequal = NodeLayout.gathered([(3, 3), (3, 3), (3, 3), (5, 1)])
    assert (unequal.num_nodes, unequal.ranks_by_node) == (2, (3, 1))
    assert not unequal.alike
    assert (unequal.ranks_on_same_node(0), unequal.ranks_on_other_nodes(0)) == ([1, 2], [3])
    # Where all name the same node, how many are on each tells nodes apart.
    assert NodeLayout.gathered([(0, 2), (0, 2), (0, 1)]) == NodeLayout.from_node_sizes(2, 1)


def write(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text + "\n")


def test_limits_of_a_cgroup_and_of_those_above_it_all_hold(tmp_path: Path) -> None:
    write(tmp_path / "a", "memory.max", "3000")
    write(tmp_path / "a" / "b", "memory.max", "max")
    write(tmp_path / "a" / "b" / "c", "memory.max", "5000")
    write(tmp_path / "other", "memory.max", "1")
    assert sorted(cgroup_limits("0::/a/b/c\n", tmp_path)) == [3000, 5000]


def test_limits_of_the_first_version_of_cgroups_hold(tmp_path: Path) -> None:
    write(tmp_path / "memory", "memory.limit_in_bytes", "9000")
    write(tmp_path / "memory" / "job", "memory.limit_in_bytes", "7000")
    write(tmp_path / "cpu" / "job", "memory.limit_in_bytes", "1")
    assert sorted(cgroup_limits("5:cpu,cpuacct:/job\n4:memory:/job\n", tmp_path)) == [7000, 9000]


def test_cached_files_of_a_cgroup_count_as_free(tmp_path: Path) -> None:
    for name, text in (
        ("memory.max", "9000"),
        ("memory.current", "8000"),
        ("memory.stat", "anon 1\ninactive_file 500"),
    ):
        write(tmp_path / "job", name, text)
    write(tmp_path, "memory.max", "max")
    assert free_in_cgroups("0::/job\n", tmp_path) == [1500]
