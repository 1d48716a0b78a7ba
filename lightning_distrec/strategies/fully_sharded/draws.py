"""Random draws into DTensors, in hooks for example: of the full tensor, of which each rank keeps its shard.

torch draws shards on CPUs by each rank's own generator: with equal seeds all ranks have the same rows.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def draw_full(operator: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Do a random operator of torch, such as aten.normal_, on a DTensor; every rank draws all of it."""
    target: DTensor = args[0]
    local = target.to_local()
    full = torch.empty(target.shape, dtype=local.dtype, device=local.device)
    drawn: Tensor = operator(full, *args[1:], **options)
    # Without a source rank nothing is sent: each rank takes its own shard.
    shard = distribute_tensor(drawn, target.device_mesh, target.placements, src_data_rank=None)
    if not operator.name().split("::")[1].split(".")[0].endswith("_"):
        return shard
    with torch.no_grad():
        local.copy_(shard.to_local())
    return target
