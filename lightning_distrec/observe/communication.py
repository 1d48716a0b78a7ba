"""Counts the exchanges of each rank per step, and the bytes that it sends, by kind."""

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
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
from lightning_distrec.observe.steps import LogTimes, Stoppable, all_gather, end_progress_bar, log
from lightning_distrec.units import format_bytes, format_ranks, print_wide, text_table

IDS = "ids"
ROWS = "rows"
ROW_GRADIENTS = "row gradients"
DENSE_GRADIENTS = "dense gradients"
GATHERED = "gathered parameters"
REPLICAS = "replicas of tables"
STAGE_OUTPUTS = "stage outputs"
STAGE_GRADIENTS = "stage gradients"
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
"""The bytes depend on the backend's algorithm; they are counted as those of a ring, from each rank
to the next."""
COLLECTIVES = ("all_to_all", "reduce_scatter", "all_gather", "all_reduce", "other calls")
"""Each has the calls of torch's functions whose names begin so."""
MEASURES = ("bytes", "bytes across nodes", *COLLECTIVES)
"""What is counted of each kind."""
MAX_SHOWN_NODES = 16
HOOKS = (
    "lightning_distrec.strategies.data_parallel",
    "torch.distributed.algorithms.ddp_comm_hooks",
)
"""The modules that exchange DDP's gradients in Python."""
# The modules that gather parameters and scatter their gradients, and the one that averages those of
# stages' replicas.
FSDP = "torch.distributed.fsdp."
STAGE_REPLICAS = "lightning_distrec.pipeline.staged_chain"

_OF_ROWS = ("torchrec.distributed.comm_ops", "lightning_distrec.sharding.lookup.short_path")
"""Modules that send rows and their gradients by other collectives too."""


def classify_call(name: str, dtype: torch.dtype, caller: str) -> str:
    """Return the kind of a call. caller: the module that makes it, which identifies torchrec's
    calls and ours."""
    # Modules are looked at before dtypes: control messages may be integers, as ids are.
    if caller.startswith("lightning_distrec.cluster."):
        return OTHER
    if caller == "torchrec.distributed.dist_data":
        return IDS  # including the weights of ids, which are floats
    if name in EXCHANGES and dtype in (torch.int32, torch.int64):
        return IDS
    # Weights follow their ids in forward; in backward this module sends their gradients, with those
    # of rows.
    if caller.endswith(".weights_exchange") and not in_backward():
        return IDS
    # TorchRec sends rows in forward and their gradients in backward by the same calls: autograd
    # alone shows which.
    if name in EXCHANGES or caller.startswith(_OF_ROWS):
        return ROW_GRADIENTS if in_backward() else ROWS
    # FSDP2 reduces gradients by reduce-scatter, and between replicas (HSDP) by all-reduce.
    if caller.startswith(FSDP):
        return GATHERED if name.startswith("all_gather") else DENSE_GRADIENTS
    if caller.startswith("lightning_distrec.sharding.replica_exchange"):
        return REPLICAS
    if caller == STAGE_REPLICAS:
        # which parameters were used: integers
        return DENSE_GRADIENTS if dtype.is_floating_point else OTHER
    return DENSE_GRADIENTS if caller.startswith(HOOKS) else OTHER


def sent_by_call(
    name: str, arguments: dict[str, Any], ranks: list[int], rank: int
) -> dict[int, float]:
    """Return the bytes that a call sends from `rank` to each other rank.

    arguments: of the collective, by name. ranks: the global ranks of the group.
    """
    if name in EXCHANGES:
        return exchanged_bytes(arguments, ranks, rank)
    if name in ROOTED:
        return rooted_bytes(name, arguments, ranks, rank)
    return ring_bytes(name, arguments, ranks, rank)


def exchanged_bytes(arguments: dict[str, Any], ranks: list[int], rank: int) -> dict[int, float]:
    """Return what `sent_by_call` does, of all_to_all_single or all_to_all."""
    if "input_tensor_list" in arguments:
        chunks = [float(_bytes(tensor)) for tensor in arguments["input_tensor_list"]]
    else:
        sent = arguments["input"]
        # Without splits torch divides the rows equally among the group's ranks.
        equal_splits = [len(sent) / len(ranks)] * len(ranks)
        splits = arguments.get("input_split_sizes") or equal_splits
        # Splits count rows of dim 0. A rank may have none to send; 1 then only avoids the division
        # by zero.
        rows = len(sent) or 1
        chunks = [_bytes(sent) * split / rows for split in splits]
    # The chunk of a rank for itself is copied, not sent.
    return {other: chunk for other, chunk in zip(ranks, chunks, strict=True) if other != rank}


def rooted_bytes(
    name: str, arguments: dict[str, Any], ranks: list[int], rank: int
) -> dict[int, float]:
    """Return what `sent_by_call` does, of a scatter or a gather."""
    side = "src" if name == "scatter" else "dst"
    root_in_group = arguments.get(f"group_{side}")
    root = (arguments.get(side) or 0) if root_in_group is None else ranks[root_in_group]
    if name == "scatter":
        receivers = [other for other in ranks if other != root] if rank == root else []
    else:
        receivers = [] if rank == root else [root]
    return dict.fromkeys(receivers, float(_bytes(arguments["tensor"])))


def ring_bytes(
    name: str, arguments: dict[str, Any], ranks: list[int], rank: int
) -> dict[int, float]:
    """Return what `sent_by_call` does, of a ring, in which each rank sends to the next one of the
    group."""
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
        shard = arguments["tensor" if name == "all_gather" else "input_tensor"]
        sent = _bytes(shard) * num_others
    return {_next_rank(ranks, rank): sent}


def reduced_bytes(ddp: DistributedDataParallel, rank: int) -> dict[int, float]:
    """Return the same as `ring_bytes` for the gradients that DDP reduces in one backward."""
    gradients = sum(
        _bytes(parameter)
        for name, parameter in ddp.module.named_parameters()
        # Sharded tables are ignored: DDP must not reduce rows that only one rank has.
        if parameter.requires_grad and name not in ddp.parameters_to_ignore
    )
    ranks = dist.get_process_group_ranks(ddp.process_group)
    return {_next_rank(ranks, rank): 2 * gradients * (len(ranks) - 1) / len(ranks)}


def _next_rank(ranks: list[int], rank: int) -> int:
    return ranks[(ranks.index(rank) + 1) % len(ranks)]


def dtype_sent(arguments: dict[str, Any]) -> torch.dtype:
    """Return the dtype of the tensors that a call sends. arguments: its arguments, by name."""
    single = [arguments[key] for key in ("input", "tensor", "input_tensor") if key in arguments]
    lists = [arguments[key] for key in ("input_tensor_list", "input_list") if key in arguments]
    dtype: torch.dtype = next(itertools.chain(single, *lists)).dtype
    return dtype


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def print_table(
    per_step: Tensor, nodes: Sequence[int], steps: int, console: Console | None = None
) -> None:
    """Print the table. per_step: (ranks, kinds, measures). nodes: that of each rank."""
    with_total = torch.cat([per_step, per_step.sum(1, keepdim=True)], dim=1)
    by_kind = dict(zip((*KINDS, "total"), with_total.permute(1, 2, 0), strict=True))
    several_nodes = bool(by_kind["total"][1].any())
    used = [i for i, calls in enumerate(by_kind["total"][2:]) if calls.any()]
    lines = [
        "All-to-alls and sends are counted exactly, other collectives as rings; gradients under "
        "DDP are computed."
    ]
    if several_nodes:
        lines += _bytes_of_nodes(by_kind["total"], nodes)
    node_headings = ["across nodes"] if several_nodes else []
    headings = [
        "kind",
        "mean",
        "max",
        "on rank",
        *node_headings,
        "source",
        *(COLLECTIVES[i] for i in used),
    ]
    title = f"Bytes and calls per rank and step ({len(per_step)} ranks, {steps} steps)"
    text = text_table(headings, ["kind", "source"], title=title, caption="\n".join(lines))
    for kind, numbers in by_kind.items():
        sent = numbers[0]
        away = numbers[1]
        calls = numbers[2:]
        if kind in RARE_KINDS and not sent.any():
            continue
        # DDP's own reduction makes no call that is seen; those of hooks and of replicas of stages
        # are.
        source = "computed" if kind == DENSE_GRADIENTS and not calls.any() else "counted"
        text.add_row(
            kind,
            format_bytes(float(sent.mean())),
            format_bytes(float(sent.max())),
            str(int(sent.argmax())) if float(sent.max()) > float(sent.min()) else "all",
            *([format_bytes(float(away.mean()))] if several_nodes else []),
            "" if kind == "total" else source,
            *(f"{float(calls[i].mean()):.1f}" if calls[i].any() else "" for i in used),
        )
    print_wide(text, console)


def _bytes_of_nodes(numbers: Tensor, nodes: Sequence[int]) -> list[str]:
    """Return a line for each of the first nodes. numbers: (measures, ranks)."""
    lines = []
    for node in sorted(set(nodes))[:MAX_SHOWN_NODES]:
        ranks = [rank for rank, other in enumerate(nodes) if other == node]
        sent, away = numbers[:2, ranks].sum(1).tolist()
        to_others = f"{format_bytes(away)} of it to other nodes"
        lines.append(
            f"node {node} (rank {format_ranks(ranks)}) sent {format_bytes(sent)}, {to_others}"
        )
    return lines


@dataclass
class SentTotals:
    """What this rank has sent, over steps."""

    by_kind: dict[str, list[float]] = field(
        default_factory=lambda: {kind: [0.0] * len(MEASURES) for kind in KINDS}
    )
    steps: int = 0

    def per_step(self) -> Tensor:
        """Return (kinds, measures), on the host."""
        # float64: beyond 2**24, which is 16 MB, float32 does not count single bytes.
        return torch.tensor(list(self.by_kind.values()), dtype=torch.float64) / max(self.steps, 1)


class Communication(Stoppable):
    """Logs the bytes and the number of a rank's exchanges, by kind, and prints a table at the end
    of a fit.

    Give it to all ranks. The loggers get what rank 0 sends per step, as `communication/<name>`; the
    table has the mean and the maximum over all ranks, and what each node sends to others.

    - `ids_bytes`: ids, lengths, weights and their sizes.
    - `rows_bytes`, `row_gradients_bytes`: looked up rows, and their gradients.
    - `replicas_of_tables_bytes`: what groups of ranks exchange about replicas of tables.
    - `stage_outputs_bytes`, `stage_gradients_bytes`: what stages of pipeline_parallel send on and
      back.
    - `gathered_parameters_bytes`: parameters that FSDP2 gathers.
    - `dense_gradients_bytes`: what DDP, or replicas of stages, average, and what FSDP2 sums and
      scatters.
    - `control_messages_and_other_bytes`: everything else. `all_bytes`: the sum.
    - `across_nodes_bytes`: what leaves the node, where there are several.
    - `ids_calls` and so on: exchanges of each kind per step; DDP's own are not seen.

    All-to-alls and sends of stages are counted to the byte, other collectives as rings in the order
    of ranks. Dense gradients under DDP are computed: DistributedDataParallel reduces them in C++,
    where calls are not seen, and a ring of W ranks sends 2 (W - 1) / W of their bytes. Not counted
    are validation, objects, other sends, and collectives that were imported by name before the fit
    or are called inside of torch.compile.
    """

    def __init__(self) -> None:
        super().__init__()
        self._log_times = LogTimes()
        self._unwatch: Callable[[], None] | None = None
        self._reductions: list[tuple[DistributedDataParallel, dict[int, float]]] = []
        self._nodes: Sequence[int] = ()
        self._evaluating = False
        self._fit = SentTotals()
        self._since_log = SentTotals()
        self._gathered: Tensor | None = None

    @property
    def bytes_per_step(self) -> dict[str, float]:
        """Bytes that this rank has sent per step of the fit, by kind: the mean over its steps so
        far."""
        return dict(zip(KINDS, self._fit.per_step()[:, 0].tolist(), strict=True))

    @property
    def mean_bytes_per_step(self) -> dict[str, float]:
        """The mean over all ranks of what each sent per step of the fit, by kind; empty before its
        end."""
        if self._gathered is None:
            return {}
        return dict(zip(KINDS, self._gathered[..., 0].mean(0).tolist(), strict=True))

    @property
    def mean_exchanges_per_step(self) -> dict[str, float]:
        """The mean over all ranks of exchanges per step, of the kinds that have any; empty before
        the fit's end."""
        if self._gathered is None:
            return {}
        calls = zip(KINDS, self._gathered[..., 2:].sum(2).mean(0).tolist(), strict=True)
        return {kind: number for kind, number in calls if number}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stop()
        self._fit = SentTotals()
        self._since_log = SentTotals()
        self._evaluating = False
        self._gathered = None
        self._log_times.start()
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        self._nodes = find_nodes(trainer)
        # the calls of hooks are seen
        reducing = [ddp for ddp in find_ddps(trainer) if not has_comm_hook(ddp)]
        self._reductions = [(ddp, reduced_bytes(ddp, trainer.global_rank)) for ddp in reducing]
        # These replace functions of torch.distributed in this process: on_exception and teardown
        # undo them too.
        undo = ExitStack()
        undo.enter_context(watch_collectives((*EXCHANGES, *ROOTED, *RINGS), self._count_call))
        undo.enter_context(watch_sends(self._count_send))
        self._unwatch = undo.close

    @override
    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        # Not on_after_backward: a callback that overrides it may read the tables' gradients, so
        # that no table could be updated inside of backward.
        for ddp, sent in self._reductions:
            # False while gradients accumulate: Lightning runs backward inside of DDP's no_sync
            # then.
            if ddp.require_backward_grad_sync:
                self._count(DENSE_GRADIENTS, sent, None)  # DDP's calls are not seen

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
        # Stopped first, so that the gather is not counted. All ranks make it, or none: each watches
        # if not alone.
        watched = self._unwatch is not None
        self.stop()
        self._gathered = self._gather(trainer) if watched and self._fit.steps else None

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table on rank 0."""
        if self._gathered is None or not trainer.is_global_zero:
            return
        end_progress_bar(trainer, pl_module)
        print_table(self._gathered, self._nodes, self._fit.steps)

    @override
    def stop(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
        self._unwatch = None
        self._reductions = []

    def _count_call(self, name: str, arguments: dict[str, Any], caller: str) -> None:
        group = arguments.get("group")
        if dist.get_rank(group) < 0:  # this rank is not in the group: the call does nothing
            return
        # Global ranks, because nodes are numbered by them; a rank in a subgroup has another number.
        sent = sent_by_call(name, arguments, dist.get_process_group_ranks(group), dist.get_rank())
        names = [begin for begin in COLLECTIVES if name.startswith(begin)]
        collective = names[0] if names else COLLECTIVES[-1]
        kind = classify_call(name, dtype_sent(arguments), caller)
        self._count(kind, sent, collective)

    def _count_send(self, tensor: Tensor, to_rank: int, caller: str) -> None:
        """Count a stage's send. caller: the function of torch's PipelineStage that makes it."""
        kind = STAGE_GRADIENTS if caller == "get_bwd_send_ops" else STAGE_OUTPUTS
        self._count(kind, {to_rank: _bytes(tensor)}, COLLECTIVES[-1])

    def _count(self, kind: str, sent: Mapping[int, float], collective: str | None) -> None:
        if self._evaluating:
            return
        node = self._nodes[dist.get_rank()]
        total = sum(sent.values())
        away = sum(size for rank, size in sent.items() if self._nodes[rank] != node)
        for totals in (self._fit, self._since_log):
            numbers = totals.by_kind[kind]
            numbers[0] += total
            numbers[1] += away
            if collective is not None:
                numbers[MEASURES.index(collective)] += 1

    def _numbers(self, traffic: SentTotals) -> dict[str, float]:
        per_step = traffic.per_step()
        numbers = {}
        for kind, (sent, _, *calls) in zip(KINDS, per_step.tolist(), strict=True):
            name = f"communication/{kind.replace(' ', '_')}"
            # A kind that the fit has sent stays, so that loggers get it at all times.
            if kind not in RARE_KINDS or self._fit.by_kind[kind][0]:
                numbers[f"{name}_bytes"] = sent
            if any(calls):
                numbers[f"{name}_calls"] = sum(calls)
        sent, across_nodes = per_step[:, :2].sum(0).tolist()
        numbers["communication/all_bytes"] = sent
        if len(set(self._nodes)) > 1:
            numbers["communication/across_nodes_bytes"] = across_nodes
        return numbers

    def _gather(self, trainer: Trainer) -> Tensor:
        """Collective. Return (ranks, kinds, measures) per step."""
        return torch.stack(all_gather(self._fit.per_step().to(trainer.strategy.root_device))).cpu()


def find_nodes(trainer: Trainer) -> Sequence[int]:
    """Return the node of each rank, as our strategies and torchrun know it; one for all where it is
    not known."""
    session = getattr(trainer.strategy, "session", None)
    if session is not None:
        return session.nodes.node_of_rank  # type: ignore[no-any-return]
    local_size = os.environ.get("LOCAL_WORLD_SIZE", "")
    is_known = local_size.isdecimal() and int(local_size)
    return [rank // int(local_size) if is_known else 0 for rank in range(trainer.world_size)]


def find_ddps(trainer: Trainer) -> list[DistributedDataParallel]:
    """Return every DistributedDataParallel of the strategy, including those around data-parallel
    tables."""
    model = trainer.strategy.model
    ddps = []
    if model is not None:
        ddps = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    tables = getattr(trainer.strategy, "run_tables", None)  # TorchRecShardedStrategy's
    # TorchRec keeps the lookups that it wraps in DDP in a plain list, which `modules()` does not
    # visit.
    for sharded in () if tables is None else tables.shards.sharded.values():
        ddps += ddp_of_data_parallel_tables(sharded)
    return ddps
