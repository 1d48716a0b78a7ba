"""What one call of a collective sends: its kind, the bytes that leave the rank, and those that leave its node."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table as TextTable
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_distrec._compat.torch import in_backward
from lightning_distrec.units import format_bytes

IDS, ROWS, ROW_GRADIENTS, DENSE_GRADIENTS = "ids", "rows", "row gradients", "dense gradients"
GATHERED, REPLICAS = "gathered parameters", "replicas of tables"
STAGE_OUTPUTS, STAGE_GRADIENTS = "stage outputs", "stage gradients"
OTHER = "control messages and other"
# Shown only where something of them is sent: most jobs have none.
RARE_KINDS = (GATHERED, REPLICAS, STAGE_OUTPUTS, STAGE_GRADIENTS)
KINDS = (IDS, ROWS, ROW_GRADIENTS, DENSE_GRADIENTS, *RARE_KINDS, OTHER)

# Each chunk has a destination, so that bytes are counted exactly.
EXCHANGES = ("all_to_all_single", "all_to_all")
RINGS = (
    *("all_reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "broadcast"),
)
"""The bytes depend on the backend's algorithm; they are counted as those of a ring of all ranks."""
HOOKS = ("lightning_distrec.strategies.data_parallel", "torch.distributed.algorithms.ddp_comm_hooks")
"""The modules that exchange DDP's gradients in Python."""
# The modules that gather parameters and scatter their gradients, and the one that averages those of stages' replicas.
FSDP, STAGE_REPLICAS = "torch.distributed.fsdp.", "lightning_distrec.strategies.stages.staged_chain"

_OF_ROWS = ("torchrec.distributed.comm_ops", "lightning_distrec.sharding.lookup.short_path")
"""Modules that send rows and their gradients by other collectives too."""


Nodes = Sequence[int] | None
"""The node of each rank; None where it is not known."""


def classify_call(name: str, dtype: torch.dtype, caller: str) -> str:
    """Return the kind of a call. caller: the module that makes it, which identifies torchrec's calls and ours."""
    # Modules are looked at before dtypes: control messages may be integers, as ids are.
    if caller.startswith("lightning_distrec.cluster."):
        return OTHER
    if caller == "torchrec.distributed.dist_data":
        return IDS  # including the weights of ids, which are floats
    if name in EXCHANGES and dtype in (torch.int32, torch.int64):
        return IDS
    # Weights follow their ids in forward; in backward this module sends their gradients, with those of rows.
    if caller.endswith(".weights_exchange") and not in_backward():
        return IDS
    # TorchRec sends rows in forward and their gradients in backward by the same calls: autograd alone shows which.
    if name in EXCHANGES or caller.startswith(_OF_ROWS):
        return ROW_GRADIENTS if in_backward() else ROWS
    # FSDP2 reduces gradients by reduce-scatter, and between replicas (HSDP) by all-reduce.
    if caller.startswith(FSDP):
        return GATHERED if name.startswith("all_gather") else DENSE_GRADIENTS
    if caller.startswith("lightning_distrec.sharding.replica_exchange"):
        return REPLICAS
    if caller == STAGE_REPLICAS:
        return DENSE_GRADIENTS if dtype.is_floating_point else OTHER  # which parameters were used: integers
    return DENSE_GRADIENTS if caller.startswith(HOOKS) else OTHER


def sent_by_stage(tensor: Tensor, to_rank: int, caller: str, rank: int, nodes: Nodes) -> tuple[str, float, float]:
    """Return the kind of a stage's send, its bytes, and those that leave the node of `rank`.

    caller: the function of torch's PipelineStage that makes it.
    """
    sent = float(_bytes(tensor))
    is_away = nodes is not None and nodes[to_rank] != nodes[rank]
    return STAGE_GRADIENTS if caller == "get_bwd_send_ops" else STAGE_OUTPUTS, sent, sent if is_away else 0.0


def exchanged_bytes(arguments: dict[str, Any], ranks: list[int], rank: int, nodes: Nodes) -> tuple[float, float]:
    """Return the bytes of an all-to-all that leave `rank`, and those that leave its node.

    arguments: of all_to_all_single or all_to_all, by name. ranks: the global ranks of the group.
    """
    if "input_tensor_list" in arguments:
        chunks = [_bytes(tensor) for tensor in arguments["input_tensor_list"]]
    else:
        sent = arguments["input"]
        splits = arguments.get("input_split_sizes")
        # Splits count rows of dim 0. A rank may have none to send; 1 then only avoids the division by zero.
        rows = len(sent) or 1
        # Without splits torch divides the rows equally among the group's ranks.
        chunks = [_bytes(sent) * split / rows for split in splits or [len(sent) / len(ranks)] * len(ranks)]
    # The chunk of a rank for itself is copied, not sent.
    to_others = [(other, chunk) for other, chunk in zip(ranks, chunks, strict=True) if other != rank]
    away = [chunk for other, chunk in to_others if nodes is not None and nodes[other] != nodes[rank]]
    return float(sum(chunk for _, chunk in to_others)), float(sum(away))


def ring_bytes(name: str, arguments: dict[str, Any], ranks: list[int], nodes: Nodes) -> tuple[float, float]:
    """Return the bytes that leave each rank in a ring of `ranks`, and those that leave its node, averaged over ranks.

    Each rank sends chunks to the next one of the group.
    """
    num_others = len(ranks) - 1
    if name == "all_reduce":
        # A reduce-scatter, then an all-gather: each sends (W - 1) / W of the bytes.
        sent = 2 * _bytes(arguments["tensor"]) * num_others / len(ranks)
    elif name == "broadcast":
        # W - 1 of the W ranks pass it on; the last one has nothing to send.
        sent = _bytes(arguments["tensor"]) * num_others / len(ranks)
    elif name == "reduce_scatter":
        sent = sum(map(_bytes, arguments["input_list"])) * num_others / len(ranks)
    elif name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        sent = _bytes(arguments["input"]) * num_others / len(ranks)
    else:
        # Here the argument is one rank's shard, and each rank sends W - 1 of those.
        sent = _bytes(arguments["tensor" if name == "all_gather" else "input_tensor"]) * num_others
    return float(sent), float(sent) * _share_across_nodes(ranks, nodes)


def reduced_bytes(ddp: DistributedDataParallel, nodes: Nodes) -> tuple[float, float]:
    """Return the same as `ring_bytes` for the gradients that DDP reduces in one backward."""
    gradients = sum(
        _bytes(parameter)
        for name, parameter in ddp.module.named_parameters()
        # Sharded tables are ignored: DDP must not reduce rows that only one rank has.
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    )
    ranks = dist.get_process_group_ranks(ddp.process_group)
    sent = 2 * gradients * (len(ranks) - 1) / len(ranks)
    return sent, sent * _share_across_nodes(ranks, nodes)


def dtype_sent(arguments: dict[str, Any]) -> torch.dtype:
    """Return the dtype of the tensors that a call sends. arguments: its arguments, by name."""
    single = [arguments[key] for key in ("input", "tensor", "input_tensor") if key in arguments]
    lists = [arguments[key] for key in ("input_tensor_list", "input_list") if key in arguments]
    dtype: torch.dtype = next(itertools.chain(single, *lists)).dtype
    return dtype


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _share_across_nodes(ranks: list[int], nodes: Nodes) -> float:
    """Return the share of a ring's links that leave a node: all, where ranks are dealt out to nodes in turns."""
    if nodes is None:
        return 0.0
    links = zip(ranks, [*ranks[1:], ranks[0]], strict=True)
    return sum(nodes[rank] != nodes[other] for rank, other in links) / len(ranks)


def print_table(per_step: Tensor, nodes: Nodes, steps: int, console: Console | None = None) -> None:
    """Print the table. per_step: shape (ranks, 3, kinds), bytes sent, those across nodes, and calls."""
    ranks = len(per_step)
    several_nodes = nodes is not None and len(set(nodes)) > 1
    title = f"Bytes sent per rank and step ({ranks} ranks, {steps} steps)"
    caption = "All-to-alls and sends are counted exactly, other collectives as rings; gradients under DDP are computed."
    text = TextTable(title=title, title_justify="left", caption=caption, caption_justify="left")
    node_headings = ["across nodes"] if several_nodes else []
    for heading in ["kind", "mean", "max", "on rank", *node_headings, "source", "calls"]:
        text.add_column(heading, justify="left" if heading in ("kind", "source") else "right")
    sent, across, calls = per_step.unbind(1)
    # DDP's own reduction makes no call that is seen; those of hooks and of replicas of stages are.
    is_computed = [kind == DENSE_GRADIENTS and not calls[:, i].any() for i, kind in enumerate(KINDS)]
    sources = ["computed" if computed else "counted" for computed in is_computed]
    columns = [(kind, sent[:, i], across[:, i], sources[i], calls[:, i]) for i, kind in enumerate(KINDS)]
    for kind, rank_bytes, away, source, num in [*columns, ("total", sent.sum(1), across.sum(1), "", calls[:, :0])]:
        if kind in RARE_KINDS and not rank_bytes.any():
            continue
        text.add_row(
            kind,
            format_bytes(float(rank_bytes.mean())),
            format_bytes(float(rank_bytes.max())),
            str(int(rank_bytes.argmax())) if float(rank_bytes.max()) > float(rank_bytes.min()) else "all",
            *([format_bytes(float(away.mean()))] if several_nodes else []),
            source,
            f"{float(num.mean()):.1f}" if num.any() else "",
        )
    (console or Console()).print(text)
