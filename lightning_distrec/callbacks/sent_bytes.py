"""What one call of a collective sends: what it is, how many bytes leave the rank, and how many its node."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_distrec._compat.torch import in_backward

IDS = "ids"
ROWS = "rows"
ROW_GRADIENTS = "row gradients"
DENSE_GRADIENTS = "dense gradients"
OTHER = "control messages and other"
KINDS = (IDS, ROWS, ROW_GRADIENTS, DENSE_GRADIENTS, OTHER)

EXCHANGES = ("all_to_all_single", "all_to_all")
"""Each rank's part has a rank that it goes to, so that every byte is counted where it goes."""
RINGS = (
    *("all_reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "broadcast"),
)
"""What leaves a rank depends on how the backend goes about it; counted as in a ring of all ranks."""


def kind_of(name: str, dtype: torch.dtype, caller: str) -> str:
    """Return what a call sends. caller: the module that makes it; torchrec's are told apart by it."""
    if caller == "torchrec.distributed.dist_data":
        return IDS  # weights of ids too, which are floats
    if name in EXCHANGES and dtype in (torch.int32, torch.int64):
        return IDS
    if name in EXCHANGES or caller.startswith("torchrec.distributed.comm_ops"):
        return ROW_GRADIENTS if in_backward() else ROWS
    return OTHER


def exchanged_bytes(
    arguments: dict[str, Any], ranks: list[int], rank: int, ranks_on_node: int | None
) -> tuple[float, float]:
    """Return the bytes of an all-to-all that leave `rank`, and those that leave its node.

    arguments: of all_to_all_single or all_to_all, by name. ranks: the group's, as numbers in the world.
    """
    if "input_tensor_list" in arguments:
        parts = [_bytes(tensor) for tensor in arguments["input_tensor_list"]]
    else:
        sent = arguments["input"]
        splits = arguments.get("input_split_sizes")
        rows = len(sent) or 1
        parts = [_bytes(sent) * split / rows for split in splits or [len(sent) / len(ranks)] * len(ranks)]
    to = [(other, part) for other, part in zip(ranks, parts, strict=True) if other != rank]
    away = [part for other, part in to if ranks_on_node and other // ranks_on_node != rank // ranks_on_node]
    return float(sum(part for _, part in to)), float(sum(away))


def ring_bytes(
    name: str, arguments: dict[str, Any], ranks: list[int], ranks_on_node: int | None
) -> tuple[float, float]:
    """Return the bytes that leave each rank in a ring of `ranks`, and those that leave its node, in the mean of ranks.

    Each rank hands pieces on to the next, so as many links cross nodes as there are nodes.
    """
    others = len(ranks) - 1
    if name == "all_reduce":
        sent = 2 * _bytes(arguments["tensor"]) * others / len(ranks)
    elif name == "broadcast":
        sent = _bytes(arguments["tensor"]) * others / len(ranks)
    elif name == "reduce_scatter":
        sent = sum(map(_bytes, arguments["input_list"])) * others / len(ranks)
    elif name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        sent = _bytes(arguments["input"]) * others / len(ranks)
    else:
        sent = _bytes(arguments["tensor" if name == "all_gather" else "input_tensor"]) * others
    return float(sent), float(sent) * _share_across_nodes(ranks, ranks_on_node)


def reduced_bytes(ddp: DistributedDataParallel, ranks_on_node: int | None) -> tuple[float, float]:
    """Return what `ring_bytes` would for the gradients that DDP averages in one backward."""
    gradients = sum(
        _bytes(parameter)
        for name, parameter in ddp.module.named_parameters()
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    )
    ranks = dist.get_process_group_ranks(ddp.process_group)
    sent = 2 * gradients * (len(ranks) - 1) / len(ranks)
    return sent, sent * _share_across_nodes(ranks, ranks_on_node)


def dtype_sent(arguments: dict[str, Any]) -> torch.dtype:
    """Return the type of what a call sends. arguments: its arguments, by name."""
    for key in ("input", "tensor", "input_tensor"):
        if key in arguments:
            dtype: torch.dtype = arguments[key].dtype
            return dtype
    return next(tensor.dtype for key in ("input_tensor_list", "input_list") for tensor in arguments.get(key, []))


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _share_across_nodes(ranks: list[int], ranks_on_node: int | None) -> float:
    if not ranks_on_node:
        return 0.0
    nodes = len({rank // ranks_on_node for rank in ranks})
    return nodes / len(ranks) if nodes > 1 else 0.0
