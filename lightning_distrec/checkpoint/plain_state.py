"""One plain state_dict of a module with sharded tables: what the user's own unsharded module loads."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardedTensor

from lightning_distrec.errors import CheckpointError


def gather_plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Collective. Return `state` with every ShardedTensor replaced by the whole table, on the host of rank 0.

    Other ranks get the entries without the tables. Tables are gathered one after the other.
    Raises CheckpointError on every rank: rank 0 has not enough free memory for the tables.
    """
    tables = {key: value for key, value in state.items() if isinstance(value, ShardedTensor)}
    if not tables:
        return dict(state)
    plain = {key: value for key, value in state.items() if key not in tables}
    is_first = dist.get_rank() == 0
    _check_memory(sum(table.size().numel() * table.dtype.itemsize for table in tables.values()), is_first)
    for key, table in tables.items():
        whole = torch.empty(table.size(), dtype=table.dtype, device=_device(table)) if is_first else None
        table.gather(0, whole)
        if whole is not None:
            plain[key] = whole.cpu()
    return {key: plain[key] for key in state if key in plain}


def _device(table: ShardedTensor) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _check_memory(needed_bytes: int, is_first: bool) -> None:
    problem: list[str | None] = [None]
    if is_first and needed_bytes > (free := _free_host_bytes()):
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
