"""How many bytes leave a rank, and what they are."""

from collections.abc import Callable
from dataclasses import dataclass, field
from os import environ
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table as TextTable
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_distrec._compat.torch import watch_collectives
from lightning_distrec._compat.torchrec import ddp_of_data_parallel_tables
from lightning_distrec.callbacks.sent_bytes import (
    DENSE_GRADIENTS,
    EXCHANGES,
    KINDS,
    RINGS,
    dtype_sent,
    exchanged_bytes,
    kind_of,
    reduced_bytes,
    ring_bytes,
)
from lightning_distrec.callbacks.steps import LogTimes, log


@dataclass
class Traffic:
    """Bytes that left this rank, by kind, and those of them that left its node."""

    sent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    across_nodes: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    steps: int = 0

    def add(self, kind: str, sent: float, across_nodes: float) -> None:
        """Count bytes that leave."""
        self.sent[kind] += sent
        self.across_nodes[kind] += across_nodes


class Communication(Callback):
    """Bytes that each rank sends per step, by kind: in the loggers, and as a table at the end of a fit.

    While a fit trains, calls of torch.distributed's collectives are counted as they are made. Dense gradients are
    computed: DistributedDataParallel averages them by itself, and a ring sends 2 (W - 1) / W of their bytes.
    The loggers get rank 0's numbers; the table has the mean over all ranks, and the most that any sends.

    Args:
        every_n_steps: optimizer steps between two entries in the loggers; None takes the Trainer's log_every_n_steps.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__()
        self._log_times = LogTimes("Communication", every_n_steps)
        self._unwatch: Callable[[], None] | None = None
        self._reductions: list[tuple[DistributedDataParallel, float, float]] = []
        self._ranks_on_node: int | None = None
        self._evaluating = False
        self._fit = Traffic()
        self._since_log = Traffic()
        self._of_ranks: Tensor | None = None

    @property
    def bytes_per_step(self) -> dict[str, float]:
        """What this rank has sent in a step of the fit, by kind: the mean over its steps so far."""
        return {kind: sent / max(self._fit.steps, 1) for kind, sent in self._fit.sent.items()}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()
        self._fit, self._since_log, self._evaluating = Traffic(), Traffic(), False
        self._log_times.start()
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return
        local = environ.get("LOCAL_WORLD_SIZE", "")
        self._ranks_on_node = int(local) if local.isdecimal() and int(local) else None
        self._reductions = [(ddp, *reduced_bytes(ddp, self._ranks_on_node)) for ddp in ddps_of(trainer)]
        self._unwatch = watch_collectives((*EXCHANGES, *RINGS), self._count_call)

    @override
    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        # Not on_after_backward: who overrides that wants the tables' gradients, so that their updates have to wait.
        for ddp, sent, across_nodes in self._reductions:
            if ddp.require_backward_grad_sync:
                self._count(DENSE_GRADIENTS, sent, across_nodes)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._fit.steps += 1
        self._since_log.steps += 1
        if self._log_times.due(trainer):
            if trainer.is_global_zero and self._unwatch is not None:
                log(trainer, self._numbers(self._since_log))
            self._since_log = Traffic()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluating = True

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._evaluating = False

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collective. Gather what all ranks have sent."""
        watched = self._unwatch is not None
        self._stop()
        self._of_ranks = self._gather(trainer) if watched and self._fit.steps else None

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Rank 0 prints what all ranks have sent."""
        if self._of_ranks is None or not trainer.is_global_zero:
            return
        if trainer.progress_bar_callback is not None:
            # A living bar redraws itself below whatever is printed.
            trainer.progress_bar_callback.teardown(trainer, pl_module, "fit")
        print_table(self._of_ranks, self._ranks_on_node, self._fit.steps)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._stop()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
        self._unwatch, self._reductions = None, []

    def _count_call(self, name: str, arguments: dict[str, Any], caller: str) -> None:
        group = arguments.get("group")
        if dist.get_rank(group) < 0:  # not one of the group: the call does nothing here
            return
        ranks = dist.get_process_group_ranks(group)
        if name in EXCHANGES:
            sent, across = exchanged_bytes(arguments, ranks, dist.get_rank(), self._ranks_on_node)
        else:
            sent, across = ring_bytes(name, arguments, ranks, self._ranks_on_node)
        self._count(kind_of(name, dtype_sent(arguments), caller), sent, across)

    def _count(self, kind: str, sent: float, across_nodes: float) -> None:
        if not self._evaluating:
            self._fit.add(kind, sent, across_nodes)
            self._since_log.add(kind, sent, across_nodes)

    def _numbers(self, traffic: Traffic) -> dict[str, float]:
        numbers = {f"communication/{kind.replace(' ', '_')}_bytes": traffic.sent[kind] for kind in KINDS}
        numbers["communication/all_bytes"] = sum(traffic.sent.values())
        if self._ranks_on_node is not None:
            numbers["communication/across_nodes_bytes"] = sum(traffic.across_nodes.values())
        return {name: number / max(traffic.steps, 1) for name, number in numbers.items()}

    def _gather(self, trainer: Trainer) -> Tensor:
        """Collective. Return bytes per step, (ranks, 2, kinds): sent, and of those across nodes."""
        mine = [list(counts.values()) for counts in (self._fit.sent, self._fit.across_nodes)]
        numbers = torch.tensor(mine, dtype=torch.float64, device=trainer.strategy.root_device) / self._fit.steps
        gathered = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, numbers)
        return torch.stack(gathered).cpu()


def ddps_of(trainer: Trainer) -> list[DistributedDataParallel]:
    """Return every DistributedDataParallel of the strategy, also those around tables that all ranks hold whole."""
    model = trainer.strategy.model
    found = [] if model is None else [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    setup = getattr(trainer.strategy, "table_setup", None)  # TorchRecShardedStrategy's
    if setup is not None:
        for sharded in setup.shards.sharded.values():
            found += ddp_of_data_parallel_tables(sharded)
    return found


def print_table(bytes_per_step: Tensor, ranks_on_node: int | None, steps: int, console: Console | None = None) -> None:
    """Print what the ranks send. bytes_per_step: (ranks, 2, kinds), sent, and of those across nodes."""
    ranks = len(bytes_per_step)
    several_nodes = ranks_on_node is not None and ranks_on_node < ranks
    text = TextTable(
        title=f"Sent by a rank per step, {ranks} ranks, {steps} steps",
        title_justify="left",
        caption="All-to-alls are counted byte by byte, other calls as rings. Gradients under DDP are computed.",
        caption_justify="left",
    )
    headings = ["what", "mean of ranks", "most", "by rank", *(["across nodes"] if several_nodes else []), "how"]
    for heading in headings:
        text.add_column(heading, justify="left" if heading in ("what", "how") else "right")
    sent, across = bytes_per_step[:, 0], bytes_per_step[:, 1]
    hows = ["computed" if kind == DENSE_GRADIENTS else "counted" for kind in KINDS]
    columns = [(kind, sent[:, i], across[:, i], how) for i, (kind, how) in enumerate(zip(KINDS, hows, strict=True))]
    for kind, of_ranks, away, how in [*columns, ("all", sent.sum(1), across.sum(1), "")]:
        text.add_row(
            kind,
            in_bytes(float(of_ranks.mean())),
            in_bytes(float(of_ranks.max())),
            str(int(of_ranks.argmax())) if float(of_ranks.max()) > float(of_ranks.min()) else "all alike",
            *([in_bytes(float(away.mean()))] if several_nodes else []),
            how,
        )
    (console or Console()).print(text)


def in_bytes(number: float) -> str:
    """Return a number of bytes in words: 950 B, 12.3 KiB, 1.2 MiB."""
    units = ["B", "KiB", "MiB", "GiB"]
    while number >= 1023.5 and len(units) > 1:
        number /= 1024
        units.pop(0)
    return f"{number:.0f} B" if units[0] == "B" else f"{number:.1f} {units[0]}"
