"""How long the exchanges of a shard take: bytes that leave a rank or a node, over the bandwidth that they share.

What a rank keeps does not travel. Ranks of a node share its link to other nodes: `cross_node` is what one of them gets
while all send, so that one alone gets it as many times as there are ranks. Formulas are those of plan/traffic.py.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.types import ShardingOption

from lightning_distrec.sharding.plan.traffic import LENGTH_BYTES, WEIGHT_BYTES
from lightning_distrec.sharding.planning.costs.batch_ids import BatchIds
from lightning_distrec.sharding.tables import SMALL_ROWS

FLOAT_BYTES = 4


@dataclass(frozen=True)
class Links:
    """What ranks send over, in bytes per millisecond."""

    num_ranks: int
    ranks_on_node: int
    on_node: float
    """What a rank sends within its node."""
    of_node: float
    """What all ranks of a node send to other nodes."""
    scatter_times: int
    """By what a reduce-scatter takes longer than its bytes: gloo sums on all ranks."""

    @staticmethod
    def of(topology: Topology) -> "Links":
        """Return those of a topology that `make_topology` has made."""
        on_node = topology.local_world_size or 1
        bandwidths = topology.comms_bandwidths
        return Links(
            num_ranks=topology.world_size,
            ranks_on_node=on_node,
            on_node=bandwidths.intra_host_bw,
            of_node=bandwidths.inter_host_bw * on_node,
            scatter_times=1 if topology.compute_device == "cuda" else 2,
        )

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.num_ranks // self.ranks_on_node

    def to_all(self, to_each: float) -> float:
        """Return the time in which one rank sends `to_each` bytes to each other rank, or gets them."""
        within = to_each * (self.ranks_on_node - 1) / self.on_node
        return within + to_each * (self.num_ranks - self.ranks_on_node) / self.of_node

    def ring(self, to_next: float) -> float:
        """Return a rank's share of the time in which each rank sends `to_next` bytes to the next; one crosses."""
        if self.num_nodes == 1:
            return to_next / self.on_node
        return to_next / self.of_node / self.ranks_on_node

    def two_levels(self, numbers: float, scatters: bool) -> float:
        """Return a rank's share of a ring on its node and of what it sends to its like on the other nodes."""
        times = self.scatter_times if scatters else 1
        ring = times * (self.ranks_on_node - 1) * self.num_nodes * numbers * FLOAT_BYTES / self.on_node
        if self.num_nodes == 1:
            return ring
        times = self.scatter_times if self.ranks_on_node > 1 else 1  # as measured on gloo, whose bytes do not say why
        across = times * (self.num_nodes - 1) * numbers * FLOAT_BYTES / self.of_node
        return ring / self.ranks_on_node + across


def exchange_milliseconds(
    option: ShardingOption, wanted: ParameterConstraints, learns: bool, links: Links, counted_share: float | None = None
) -> NDArray[np.float64]:
    """Return, (D, 3), for each size of a shard the time of its ids, its rows and the rows' gradients.

    counted_share: different ids over ids of a batch, if they were counted; repeated ones may be sent once.
    On one node it is a rank's, on several that of a node's link, which all ranks of the node wait for.
    """
    found = np.zeros((len(option.shards), 3))
    if links.num_ranks == 1:
        return found
    num_rows, batch = option.tensor.shape[0], (wanted.batch_sizes or [option.batch_size])[0]
    per_example, features = sum(option.input_lengths), len(option.input_lengths)
    if not option.is_pooled and option.sharding_type != "data_parallel":
        repeated = BatchIds.of([batch * factor for factor in option.input_lengths], num_rows, counted_share)
        per_example *= repeated.distinct_share if repeated.repeat_enough else 1
    id_bytes = (4 if num_rows <= SMALL_ROWS else 8) + (WEIGHT_BYTES if wanted.is_weighted else 0)
    for i, shard in enumerate(option.shards):
        rows, columns = shard.size
        ids = batch * per_example * id_bytes * rows / num_rows + batch * features * LENGTH_BYTES
        numbers = batch * columns * (features if option.is_pooled else per_example)
        kind = option.sharding_type
        if kind == "data_parallel":
            found[i, 2] = links.ring(2 * rows * columns * FLOAT_BYTES * (links.num_ranks - 1) / links.num_ranks)
        elif kind == "row_wise" and option.is_pooled:
            to_next = (links.num_ranks - 1) * numbers * FLOAT_BYTES
            found[i] = links.to_all(ids), links.ring(links.scatter_times * to_next), links.ring(to_next)
        elif kind == "table_row_wise":
            found[i] = links.to_all(ids), links.two_levels(numbers, True), links.two_levels(numbers, False)
        else:
            sent = numbers * FLOAT_BYTES * (rows / num_rows if kind == "row_wise" else 1)
            found[i] = links.to_all(ids), links.to_all(sent), links.to_all(sent)
    return found if learns else found * (1, 1, 0)
