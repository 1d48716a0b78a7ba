"""Random draws into DTensors, in hooks for example: of the full tensor, of which each rank keeps its shard.

torch draws shards on CPUs by each rank's own generator: with equal seeds all ranks have the same rows.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_distrec._compat.tensors import local_offsets


def draw_full(operator: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Do a random operator of torch, such as aten.normal_, on a DTensor; every rank draws all of it."""
    target: DTensor = args[0]
    local = target.to_local()
    # bernoulli alone reads its values: they are probabilities.
    reads = operator.name() == "aten::bernoulli"
    full = target.full_tensor() if reads else torch.empty(target.shape, dtype=local.dtype, device=local.device)
    drawn: Tensor = operator(full, *args[1:], **options)
    for dim, (offset, length) in enumerate(zip(local_offsets(target), local.shape, strict=True)):
        drawn = drawn.narrow(dim, offset, length)
    # A sum over ranks that is not complete yet: the first one has the numbers, others 0.
    coordinates = target.device_mesh.get_coordinate() or ()
    if any(p.is_partial() and place for p, place in zip(target.placements, coordinates, strict=True)):
        drawn = torch.zeros_like(drawn)
    if not operator.name().split("::")[1].split(".")[0].endswith("_"):
        mesh, placements, shape = target.device_mesh, target.placements, target.shape
        return DTensor.from_local(drawn.clone(), mesh, placements, run_check=False, shape=shape, stride=target.stride())
    with torch.no_grad():
        local.copy_(drawn)
    return target
