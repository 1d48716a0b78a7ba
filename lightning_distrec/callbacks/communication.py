"""Counts the exchanges of each rank per step, and the bytes that it sends, by kind."""

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_distrec._compat.tensors import watch_sends
from lightning_distrec._compat.torch import has_comm_hook, watch_collectives
from lightning_distrec._compat.torchrec import ddp_of_data_parallel_tables
from lightning_distrec.callbacks.sent_bytes import (
    DENSE_GRADIENTS,
    EXCHANGES,
    KINDS,
    RARE_KINDS,
    RINGS,
    Nodes,
    classify_call,
    dtype_sent,
    exchanged_bytes,
    print_table,
    reduced_bytes,
    ring_bytes,
    sent_by_stage,
)
from lightning_distrec.callbacks.steps import LogTimes, Stoppable, log


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
        undo.enter_context(watch_collectives((*EXCHANGES, *RINGS), self._count_call))
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
