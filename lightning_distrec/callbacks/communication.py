"""Counts the exchanges of each rank per step, and the bytes that it sends, by kind."""

import itertools
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_distrec._compat.tensors import watch_sends
from lightning_distrec._compat.torch import has_comm_hook, in_backward, watch_collectives
from lightning_distrec._compat.torchrec_modules import ddp_of_data_parallel_tables
from lightning_distrec.callbacks.steps import LogTimes, Stoppable, log
from lightning_distrec.units import format_bytes, text_table

IDS, ROWS, ROW_GRADIENTS, DENSE_GRADIENTS = "ids", "rows", "row gradients", "dense gradients"
GATHERED, REPLICAS = "gathered parameters", "replicas of tables"
STAGE_OUTPUTS, STAGE_GRADIENTS = "stage outputs", "stage gradients"
OTHER = "control messages and other"
# Shown only where something of them is sent: most jobs have none.
RARE_KINDS = (GATHERED, REPLICAS, STAGE_OUTPUTS, STAGE_GRADIENTS)
KINDS = (IDS, ROWS, ROW_GRADIENTS, DENSE_GRADIENTS, *RARE_KINDS, OTHER)

# Each chunk has a destination, so that bytes are counted exactly.
EXCHANGES = ("all_to_all_single", "all_to_all")
ROOTED = ("scatter", "gather")
"""One rank sends each other one a tensor, or receives one from each."""
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


def rooted_bytes(
    name: str, arguments: dict[str, Any], ranks: list[int], rank: int, nodes: Nodes
) -> tuple[float, float]:
    """Return the bytes of a scatter or a gather that leave `rank`, and those that leave its node."""
    side = "src" if name == "scatter" else "dst"
    root_in_group = arguments.get(f"group_{side}")
    root = (arguments.get(side) or 0) if root_in_group is None else ranks[root_in_group]
    if name == "scatter":
        receivers = [other for other in ranks if other != root] if rank == root else []
    else:
        receivers = [] if rank == root else [root]
    num_away = sum(nodes is not None and nodes[other] != nodes[rank] for other in receivers)
    sent = float(_bytes(arguments["tensor"]))
    return sent * len(receivers), sent * num_away


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
    node_headings = ["across nodes"] if several_nodes else []
    headings = ["kind", "mean", "max", "on rank", *node_headings, "source", "calls"]
    text = text_table(headings, ["kind", "source"], title=title, caption=caption)
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


@dataclass
class SentTotals:
    """Bytes that left this rank, by kind, those of them that left its node, and the number of exchanges."""

    sent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    across_nodes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    calls: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    steps: int = 0


class Communication(Stoppable):
    """Logs the bytes and the number of a rank's exchanges, by kind, and prints a table at the end of a fit.

    Calls of torch.distributed's collectives, and the sends between stages of pipeline_parallel, are counted while a fit
    trains. Dense gradients under DDP are computed instead: DistributedDataParallel reduces them in C++, where calls are
    not seen; a ring of W ranks sends 2 (W - 1) / W of their bytes. The loggers get the numbers of rank 0; the table has
    the mean and the maximum over all ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self._log_times = LogTimes()
        self._unwatch: Callable[[], None] | None = None
        self._reductions: list[tuple[DistributedDataParallel, float, float]] = []
        self._nodes: Nodes = None
        self._evaluating = False
        self._fit = SentTotals()
        self._since_log = SentTotals()
        self._gathered: Tensor | None = None

    @property
    def bytes_per_step(self) -> dict[str, float]:
        """Bytes that this rank has sent per step of the fit, by kind: the mean over its steps so far."""
        return {kind: sent / max(self._fit.steps, 1) for kind, sent in self._fit.sent.items()}

    @property
    def mean_bytes_per_step(self) -> dict[str, float]:
        """The mean over all ranks of what each sent per step of the fit, by kind; empty before its end."""
        return {} if self._gathered is None else dict(zip(KINDS, self._gathered[:, 0].mean(0).tolist(), strict=True))

    @property
    def mean_exchanges_per_step(self) -> dict[str, float]:
        """The mean over all ranks of exchanges per step, of the kinds that have any; empty before the fit's end."""
        if self._gathered is None:
            return {}
        calls = zip(KINDS, self._gathered[:, 2].mean(0).tolist(), strict=True)
        return {kind: number for kind, number in calls if number}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stop()
        self._fit, self._since_log, self._evaluating = SentTotals(), SentTotals(), False
        self._gathered = None
        self._log_times.start()
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self._nodes = find_nodes(trainer)
        reducing = [ddp for ddp in find_ddps(trainer) if not has_comm_hook(ddp)]  # the calls of hooks are seen
        self._reductions = [(ddp, *reduced_bytes(ddp, self._nodes)) for ddp in reducing]
        # These replace functions of torch.distributed in this process: on_exception and teardown undo them too.
        undo = ExitStack()
        undo.enter_context(watch_collectives((*EXCHANGES, *ROOTED, *RINGS), self._count_call))
        undo.enter_context(watch_sends(self._count_send))
        self._unwatch = undo.close

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        # Not on_after_backward: a callback that overrides it may read the tables' gradients, so that no table could be
        # updated inside of backward.
        for ddp, sent, across_nodes in self._reductions:
            # False while gradients accumulate: Lightning runs backward inside of DDP's no_sync then.
            if ddp.require_backward_grad_sync:
                self._count(DENSE_GRADIENTS, sent, across_nodes, calls=0)  # DDP's calls are not seen

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._fit.steps += 1
        self._since_log.steps += 1
        if self._log_times.due(trainer):
            if trainer.is_global_zero and self._unwatch is not None:
                log(trainer, self._numbers(self._since_log))
            self._since_log = SentTotals()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluating = True

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluating = False

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collective. Gather the counts of all ranks."""
        # Stopped first, so that the gather is not counted. All ranks make it, or none: each watches if not alone.
        watched = self._unwatch is not None
        self.stop()
        self._gathered = self._gather(trainer) if watched and self._fit.steps else None

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table on rank 0."""
        if self._gathered is None or not trainer.is_global_zero:
            return
        if trainer.progress_bar_callback is not None:
            # An active progress bar would be drawn again below the table.
            trainer.progress_bar_callback.teardown(trainer, pl_module, "fit")
        print_table(self._gathered, self._nodes, self._fit.steps)

    @override
    def stop(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
        self._unwatch, self._reductions = None, []

    def _count_call(self, name: str, arguments: dict[str, Any], caller: str) -> None:
        group = arguments.get("group")
        if dist.get_rank(group) < 0:  # this rank is not in the group: the call does nothing
            return
        # Global ranks, because nodes are numbered by them; a rank in a subgroup has another number.
        ranks = dist.get_process_group_ranks(group)
        if name in EXCHANGES:
            sent, across = exchanged_bytes(arguments, ranks, dist.get_rank(), self._nodes)
        elif name in ROOTED:
            sent, across = rooted_bytes(name, arguments, ranks, dist.get_rank(), self._nodes)
        else:
            sent, across = ring_bytes(name, arguments, ranks, self._nodes)
        self._count(classify_call(name, dtype_sent(arguments), caller), sent, across, calls=1)

    def _count_send(self, tensor: Tensor, to_rank: int, caller: str) -> None:
        kind, sent, across = sent_by_stage(tensor, to_rank, caller, dist.get_rank(), self._nodes)
        self._count(kind, sent, across, calls=1)

    def _count(self, kind: str, sent: float, across_nodes: float, calls: int) -> None:
        for totals in () if self._evaluating else (self._fit, self._since_log):
            totals.sent[kind] += sent
            totals.across_nodes[kind] += across_nodes
            totals.calls[kind] += calls

    def _numbers(self, traffic: SentTotals) -> dict[str, float]:
        shown = [kind for kind in KINDS if kind not in RARE_KINDS or self._fit.calls[kind]]
        numbers = {f"communication/{kind.replace(' ', '_')}_bytes": traffic.sent[kind] for kind in shown}
        numbers["communication/all_bytes"] = sum(traffic.sent.values())
        if self._nodes is not None:
            numbers["communication/across_nodes_bytes"] = sum(traffic.across_nodes.values())
        numbers |= {f"communication/{kind.replace(' ', '_')}_calls": n for kind, n in traffic.calls.items() if n}
        return {name: number / max(traffic.steps, 1) for name, number in numbers.items()}

    def _gather(self, trainer: Trainer) -> Tensor:
        """Collective. Return numbers per step, shape (ranks, 3, kinds): bytes, those across nodes, and calls."""
        fit = self._fit
        counts = [list(counts.values()) for counts in (fit.sent, fit.across_nodes, fit.calls)]
        # float64: beyond 2**24, which is 16 MB, float32 does not count single bytes.
        numbers = torch.tensor(counts, dtype=torch.float64, device=trainer.strategy.root_device) / self._fit.steps
        gathered = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, numbers)
        return torch.stack(gathered).cpu()


def find_nodes(trainer: Trainer) -> Nodes:
    """Return the node of each rank, as our strategies and torchrun know it; None: what leaves a node is not shown."""
    if (session := getattr(trainer.strategy, "session", None)) is not None:
        return session.nodes.node_of_rank  # type: ignore[no-any-return]
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not local_size.isdecimal() or not int(local_size):
        return None
    return [rank // int(local_size) for rank in range(trainer.world_size)]


def find_ddps(trainer: Trainer) -> list[DistributedDataParallel]:
    """Return every DistributedDataParallel of the strategy, including those around data-parallel tables."""
    model = trainer.strategy.model
    ddps = [] if model is None else [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    tables = getattr(trainer.strategy, "run_tables", None)  # TorchRecShardedStrategy's
    # TorchRec keeps the lookups that it wraps in DDP in a plain list, which `modules()` does not visit.
    for sharded in () if tables is None else tables.shards.sharded.values():
        ddps += ddp_of_data_parallel_tables(sharded)
    return ddps
