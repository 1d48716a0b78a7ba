"""Shards lie on the device that their rank has, which torchrec's planner can only guess."""

from collections.abc import Sequence

import torch
from torchrec.distributed.types import EnumerableShardingSpec, ParameterSharding


def put_on_devices(plan: dict[str, ParameterSharding], devices: Sequence[torch.device]) -> None:
    """Let the plan's shards lie on each rank's own device.

    devices: of each rank, as that rank calls it. torchrec numbers a node's GPUs by rank, which is wrong where nodes are
    unequal, or where a launcher shows each rank one GPU alone, that all of them call cuda:0.
    """
    for sharding in plan.values():
        if not isinstance(sharding.sharding_spec, EnumerableShardingSpec):
            continue
        for shard in sharding.sharding_spec.shards:
            planned = shard.placement
            assert planned is not None
            rank = planned.rank()
            assert rank is not None
            shard.placement = type(planned)(f"rank:{rank}/{devices[rank]}")
