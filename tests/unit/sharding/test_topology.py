"""What torchrec's planner is told of ranks, nodes and memory."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.constants import INTRA_NODE_BANDWIDTH
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import EnumerableShardingSpec

from lightning_distrec.host_memory import cgroup_limits, free_in_cgroups
from lightning_distrec.sharding.planning.bandwidths import AssumedBandwidths, bandwidth_request
from lightning_distrec.sharding.planning.constraints import TableConstraints
from lightning_distrec.sharding.planning.planner import Planner
from lightning_distrec.sharding.planning.table_options import TableOptions
from lightning_distrec.sharding.planning.topology import RankMemory, make_topology
from lightning_distrec.sharding.sharders import sharders
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.sharding.tables import find_tables

CPU, GPU = torch.device("cpu"), torch.device("cuda")
ROWS, DIM, BATCH = 1000, 16, 512


def bandwidths(**inputs: str) -> AssumedBandwidths:
    return bandwidth_request(dict(inputs), {}).with_measured({})


def topology(
    places: NodeLayout, device: torch.device = CPU, memory: tuple[int, ...] = (), **inputs: str
) -> Topology:
    memory = memory or (10**9,) * places.num_ranks
    host = (10**10 if device.type == "cuda" else 0,) * places.num_ranks
    return make_topology(
        device, places, RankMemory(device_bytes=memory, host_bytes=host), bandwidths(**inputs)
    )


def options(described: Topology, cut: str) -> ShardingOption:
    """Return torchrec's estimate of one table that is cut in this way."""
    table = EmbeddingBagConfig(
        name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"]
    )
    root = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[table])})
    actual = EmbeddingEnumerator(described, batch_size=BATCH).enumerate(root, sharders())
    return next(o for o in actual if o.sharding_type == cut and o.compute_kernel == "fused")


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


def test_torchrec_counts_bytes_per_millisecond() -> None:
    # A table on one rank sends each of two ranks a row of 32-bit numbers for each of its examples.
    row = options(topology(NodeLayout.from_node_sizes(2), intra_node="1GB/s"), "table_wise").shards[
        0
    ]
    assert row.perf is not None
    assert row.perf.fwd_comms == pytest.approx(2 * BATCH * DIM * 4 / 1e9 * 1000)
    assert INTRA_NODE_BANDWIDTH * 1000 == 600 * 2**30


def test_shards_lie_on_the_device_that_their_rank_has() -> None:
    table = EmbeddingBagConfig(
        name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"]
    )
    root = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=[table])})
    tables = find_tables(root).tables
    constraints = {"ebc.t": TableConstraints(("row_wise",), False, TableOptions())}
    plan = Planner(
        tables, constraints, topology(NodeLayout.from_node_sizes(2, 1), GPU), BATCH
    ).make_plan()
    devices = [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cuda", 0)]
    spec = plan.for_torchrec(devices)["ebc.t"].sharding_spec
    assert isinstance(spec, EnumerableShardingSpec)
    assert [(s.placement.rank(), s.placement.device()) for s in spec.shards if s.placement] == [
        *enumerate(devices)
    ]


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


def test_a_cgroup_that_cannot_be_seen_leaves_the_containers_limit(tmp_path: Path) -> None:
    write(tmp_path, "memory.max", "8000")
    for membership in ("0::/../elsewhere\n", "", "nonsense", "0::/gone/too\n"):
        assert cgroup_limits(membership, tmp_path) == [8000]
