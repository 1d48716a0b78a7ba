"""Whole tensors on rank 0, for those who want one plain file instead of a folder."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distrec.checkpoint.save import Ranks
from lightning_distrec.checkpoint.shards import parts_of
from lightning_distrec.checkpoint.skeleton import mapped
from lightning_distrec.chunks import Box, ChunkedTensor, chunks, narrowed
from lightning_distrec.errors import CheckpointError


def gather_whole(state: Any, ranks: Ranks) -> Any:
    """Collective. Return nested dicts and lists with whole tensors, on the host of rank 0, for those in parts.

    Other ranks get empty tensors in their place. They go to rank 0 one after the other, in chunks of 64 MiB, so that no
    device holds more than its own parts and a chunk.
    Raises CheckpointError on every rank: rank 0 has not enough free memory for them.
    """
    found: list[ChunkedTensor] = []

    def collected(value: Any, path: str) -> Any:
        parted = parts_of(value)
        if parted is None:
            return mapped(value, path, collected)
        found.append(parted)
        return parted

    state = collected(state, "")
    ranks.all_or_none("gathering the tables", lambda: _check_memory(found, ranks.rank))
    boxes = ranks.all_gather([[part.box for part in parted.parts] for parted in found])
    whole = {id(parted): _send_to_first(parted, [of[i] for of in boxes], ranks.rank) for i, parted in enumerate(found)}

    def put(value: Any, path: str) -> Any:
        return whole[id(value)] if isinstance(value, ChunkedTensor) else mapped(value, path, put)

    return put(state, "")


def _send_to_first(parted: ChunkedTensor, boxes: list[list[Box]], rank: int) -> Tensor:
    """Collective. Return the whole tensor on rank 0, on the host; an empty one on the others."""
    whole = torch.empty(parted.shape if rank == 0 else 0, dtype=parted.dtype)
    zero = (0,) * len(parted.shape)
    mine = {part.box: part.tensor for part in parted.parts}
    for owner, of_owner in enumerate(boxes):
        for offsets, shape in of_owner:
            for first, count in chunks(shape, parted.dtype.itemsize):
                box = (offsets[0] + first, *offsets[1:]), (count, *shape[1:])
                part = mine[offsets, shape][first : first + count] if owner == rank else None
                rows = (
                    None if part is None else part.to(_device()).contiguous()
                )  # NCCL sends none that wait on the host
                if rank == 0 and rows is None:
                    rows = torch.empty(box[1], dtype=parted.dtype, device=_device())
                    dist.recv(rows, src=owner)
                elif rank and rows is not None:
                    dist.send(rows, dst=0)
                if rank == 0 and rows is not None:
                    narrowed(whole, zero, box).copy_(rows)
    return whole


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _check_memory(tensors: list[ChunkedTensor], rank: int) -> None:
    needed = sum(torch.Size(parted.shape).numel() * parted.dtype.itemsize for parted in tensors)
    if rank == 0 and needed > (free := _free_host_bytes()):
        raise CheckpointError(
            f"a checkpoint in one file gathers the tables on rank 0: {needed:,} bytes, but its host has {free:,} free. "
            "Leave checkpoint={'distributed': True}, where each rank writes its own part."
        )


def _free_host_bytes() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))


def plain_optimizer_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state as torch keeps it: parameters by number instead of by name.

    state: "param_groups", whose "params" are names, and "state", by name.
    """
    numbers: dict[str, int] = {}
    groups = []
    for group in state["param_groups"]:
        for name in group["params"]:
            numbers.setdefault(name, len(numbers))
        groups.append({**group, "params": [numbers[name] for name in group["params"]]})
    return {"state": {numbers[name]: values for name, values in state["state"].items()}, "param_groups": groups}
