"""Full tensors on rank 0, for one plain file instead of a folder."""

import platform
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distrec.checkpoint.chunking import as_chunked
from lightning_distrec.checkpoint.plain_state import map_nested
from lightning_distrec.chunks import Box, ChunkedTensor, narrowed, row_ranges
from lightning_distrec.errors import CheckpointError
from lightning_distrec.host_memory import free_host_bytes
from lightning_distrec.ranks import Ranks


def gather_everywhere(state: Mapping[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Collective. Return the state with full tensors, on the host of every rank, in place of sharded ones.

    Raises CheckpointError on every rank: a host has not enough free memory for those of all of its ranks.
    """
    sharded = {key: chunked for key, value in state.items() if (chunked := as_chunked(value)) is not None}
    hosts = ranks.all_gather(platform.node())
    needed = sum(map(num_bytes, sharded.values())) * hosts.count(hosts[ranks.rank])

    def check() -> None:
        if needed > (free := free_host_bytes()):
            raise CheckpointError(
                f"full tensors on every rank need {needed:,} bytes on the host {hosts[ranks.rank]}, which has {free:,} "
                "free. Set rank_0_only=True, or load a checkpoint into a new module in one process."
            )

    ranks.all_or_none("gathering the tables", check)
    boxes = ranks.all_gather([[chunk.box for chunk in chunked.chunks] for chunked in sharded.values()])
    full = {
        key: _send(chunked, [rank_boxes[i] for rank_boxes in boxes], ranks, None, to_all=True)
        for i, (key, chunked) in enumerate(sharded.items())
    }
    return {**state, **full}


def gather_on_rank_0(state: Any, ranks: Ranks, group: Any = None) -> Any:
    """Collective. Return nested dicts and lists with full tensors, on the host of rank 0, in place of sharded ones.

    Other ranks get empty tensors in their place. They go to rank 0 one after the other, in blocks of 64 MiB, so that no
    device holds more than its own shards and a block.
    group: a gloo group to send them over, for a thread; None: the default group.
    Raises CheckpointError on every rank: rank 0 has not enough free memory for them.
    """
    sharded: list[ChunkedTensor] = []

    def collected(value: Any, path: str) -> Any:
        chunked = as_chunked(value)
        if chunked is None:
            return map_nested(value, path, collected)
        sharded.append(chunked)
        return chunked

    state = collected(state, "")
    ranks.all_or_none("gathering the tables", lambda: _check_memory(sharded, ranks.rank))
    boxes = ranks.all_gather([[chunk.box for chunk in chunked.chunks] for chunked in sharded])
    full = {
        id(chunked): _send(chunked, [rank_boxes[i] for rank_boxes in boxes], ranks, group, to_all=False)
        for i, chunked in enumerate(sharded)
    }

    def put(value: Any, path: str) -> Any:
        return full[id(value)] if isinstance(value, ChunkedTensor) else map_nested(value, path, put)

    return put(state, "")


def _send(chunked: ChunkedTensor, boxes: list[list[Box]], ranks: Ranks, group: Any, to_all: bool) -> Tensor:
    """Collective. Return the full tensor, on rank 0's host or on all; an empty one on others. boxes: each rank's."""
    rank = ranks.rank
    receives = rank == 0 or to_all
    full = torch.empty(chunked.shape if receives else 0, dtype=chunked.dtype)
    zero = (0,) * len(chunked.shape)
    local_chunks = {chunk.box: chunk.tensor for chunk in chunked.chunks}
    device = torch.device("cpu") if ranks.num_ranks == 1 or group is not None else _device()
    for source, source_boxes in enumerate(boxes):
        for offsets, shape in source_boxes:
            for first, count in row_ranges(shape, chunked.dtype.itemsize):
                box = (offsets[0] + first, *offsets[1:]), (count, *shape[1:])
                block = local_chunks[offsets, shape][first : first + count] if source == rank else None
                if block is None and not receives:
                    continue
                # NCCL sends no tensors on the host.
                rows = torch.empty(box[1], dtype=chunked.dtype, device=device) if block is None else block.to(device)
                rows = rows.contiguous()
                if to_all and ranks.num_ranks > 1:
                    dist.broadcast(rows, src=source, group=group)
                elif rank == 0 and source:
                    dist.recv(rows, src=source, group=group)
                elif rank:
                    dist.send(rows, dst=0, group=group)
                if receives:
                    narrowed(full, zero, box).copy_(rows)
    return full


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _check_memory(tensors: list[ChunkedTensor], rank: int) -> None:
    needed = sum(map(num_bytes, tensors))
    if rank == 0 and needed > (free := free_host_bytes()):
        raise CheckpointError(
            f"a checkpoint in one file gathers the tables on rank 0: {needed:,} bytes, but its host has {free:,} free. "
            "Set checkpoint={'distributed': True}, where each rank writes its own shards."
        )


def num_bytes(chunked: ChunkedTensor) -> int:
    """Return the bytes of the full tensor."""
    return torch.Size(chunked.shape).numel() * chunked.dtype.itemsize
