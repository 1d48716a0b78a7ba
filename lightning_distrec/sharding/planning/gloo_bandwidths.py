"""How fast collectives over gloo are, as torchrec's estimators ask for it."""

from torchrec.distributed.planner.types import BasicCommsBandwidths, CollectiveType
from typing_extensions import override


class GlooBandwidths(BasicCommsBandwidths):
    """Those of torchrec, but for two collectives.

    gloo scatters sums by summing everywhere (torch 2.13: twice the bytes on the wire, as all_reduce sends them). And
    torchrec takes the sums of data_parallel tables to travel between nodes even where there is one.
    """

    @override
    def get_bw(self, local_world_size: int, world_size: int, collective_type: CollectiveType) -> float:
        """Return bytes per millisecond of a collective of `world_size` ranks, `local_world_size` of them on a node."""
        if collective_type == CollectiveType.ALL_REDUCE and world_size <= local_world_size:
            # torchrec asks for the time of the table's bytes; a ring sends nearly twice as many.
            return self.intra_host_bw / (2 * (world_size - 1) / world_size) if world_size > 1 else self.intra_host_bw
        bandwidth = float(super().get_bw(local_world_size, world_size, collective_type))
        return bandwidth / 2 if collective_type == CollectiveType.REDUCE_SCATTER else bandwidth
