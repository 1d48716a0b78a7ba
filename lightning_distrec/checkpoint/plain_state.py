"""One plain state_dict of a module with sharded tables: what the user's own unsharded module loads."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.types import ShardedTensor

from lightning_distrec.errors import CheckpointError

CHUNK_BYTES = 64 * 2**20
"""Most of a table that travels at a time."""


def gather_plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Collective. Return `state` with every ShardedTensor replaced by the whole table, on the host of rank 0.

    Other ranks get the entries without the tables. Tables go to rank 0 one after the other, in chunks of 64 MiB, so
    that no device holds more than its own shards and a chunk.
    Raises CheckpointError on every rank: rank 0 has not enough free memory for the tables.
    """
    tables = {key: value for key, value in state.items() if isinstance(value, ShardedTensor)}
    if not tables:
        return dict(state)
    _check_memory(sum(table.size().numel() * table.dtype.itemsize for table in tables.values()))
    plain = {key: value for key, value in state.items() if key not in tables}
    for key, table in tables.items():
        whole = _send_to_first(table)
        if whole is not None:
            plain[key] = whole
    return {key: plain[key] for key in state if key in plain}


def _send_to_first(table: ShardedTensor) -> Tensor | None:
    """Collective. Return the whole table on rank 0, (num_rows, dim) on the host, None on the others."""
    rank = dist.get_rank()
    whole = torch.empty(table.size(), dtype=table.dtype) if rank == 0 else None
    local = {tuple(shard.metadata.shard_offsets): shard.tensor.detach() for shard in table.local_shards()}
    for shard in table.metadata().shards_metadata:
        assert shard.placement is not None
        owner = shard.placement.rank()
        (top, left), (num_rows, num_columns) = shard.shard_offsets, shard.shard_sizes
        for first, count in _chunks(num_rows, num_columns * table.dtype.itemsize):
            rows = local[top, left][first : first + count].contiguous() if owner == rank else None
            if whole is not None and rows is None:
                rows = torch.empty(count, num_columns, dtype=table.dtype, device=_device())
                dist.recv(rows, src=owner)
            elif rows is not None and whole is None:
                dist.send(rows, dst=0)
            if whole is not None and rows is not None:
                whole[top + first : top + first + count, left : left + num_columns].copy_(rows)
    return whole


def _chunks(num_rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    at_once = max(1, CHUNK_BYTES // max(1, row_bytes))
    return ((first, min(at_once, num_rows - first)) for first in range(0, num_rows, at_once))


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _check_memory(needed_bytes: int) -> None:
    problem: list[str | None] = [None]
    if dist.get_rank() == 0 and needed_bytes > (free := _free_host_bytes()):
        problem[0] = (
            f"a checkpoint gathers the tables on rank 0: {needed_bytes:,} bytes, but its host has {free:,} free. "
            "Set Trainer(enable_checkpointing=False), or give rank 0's host more memory."
        )
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise CheckpointError(problem[0])


def _free_host_bytes() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
