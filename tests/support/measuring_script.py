"""The ranks of one machine, which measure bandwidths and print them as JSON. Arguments: which
machine, ranks on each.

They are forked from one process, because importing takes far longer than measuring.
"""

import json
import multiprocessing
import sys

import torch
import torch.distributed as dist

from lightning_distrec.cluster.consensus import job_consensus
from lightning_distrec.sharding.planning.bandwidths import measured_bandwidths
from lightning_distrec.sharding.sharding_groups import NodeLayout


def measure(rank: int, places: NodeLayout) -> None:
    """Measure what travels, as one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=places.num_ranks)
    ranks = job_consensus(60.0).general
    actual = measured_bandwidths(("intra_node", "cross_node"), places, torch.device("cpu"), ranks)
    print(json.dumps({name: first.bytes_per_second for name, first in actual.items()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks of this machine."""
    machine, *ranks_by_node = map(int, sys.argv[1:])
    places = NodeLayout.from_node_sizes(*ranks_by_node)
    fork = multiprocessing.get_context("fork")
    local = [rank for rank, node in enumerate(places.node_of_rank) if node == machine]
    ranks = [fork.Process(target=measure, args=(rank, places)) for rank in local]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))


if __name__ == "__main__":
    main()
