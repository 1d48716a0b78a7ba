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

from lightning_distrec._compat import ddp_of_whole_tables, in_backward, watch_collectives
from lightning_distrec.callbacks.steps import LogTimes, log

IDS = "ids"
ROWS = "rows"
ROW_GRADIENTS = "gradients of rows"
DENSE_GRADIENTS = "dense gradients"
OTHER = "agreements and other"
KINDS = (IDS, ROWS, ROW_GRADIENTS, DENSE_GRADIENTS, OTHER)

EXCHANGES = ("all_to_all_single", "all_to_all")
"""Each rank's part has a rank that it goes to, so that every byte is counted where it goes."""
RINGS = (
    *("all_reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single"),
    *("all_gather", "all_gather_into_tensor", "all_gather_single", "broadcast"),
)
"""What leaves a rank depends on how the backend goes about it; counted as in a ring of all ranks."""


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

    @property
    def bytes_per_step(self) -> dict[str, float]:
        """What this rank has sent in a step of the fit, by kind: the mean over its steps so far."""
        return {kind: sent / max(self._fit.steps, 1) for kind, sent in self._fit.sent.items()}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop()
        self._fit, self._since_log, self._evaluating = Traffic(), Traffic(), False
        self._log_times.start()
        if not dist.is_available() or not dist.is_initialized():
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
        """Collective. Rank 0 prints what all ranks have sent."""
        watched = self._unwatch is not None
        self._stop()
        if watched and self._fit.steps:
            print_table(self._of_all_ranks(trainer), self._ranks_on_node, self._fit.steps, trainer.is_global_zero)

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
        self._count(kind_of(name, _dtype_sent(name, arguments), caller), sent, across)

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

    def _of_all_ranks(self, trainer: Trainer) -> Tensor:
        """Collective. Return bytes per step, (ranks, 2, kinds): sent, and of those across nodes."""
        mine = [list(counts.values()) for counts in (self._fit.sent, self._fit.across_nodes)]
        device = trainer.strategy.root_device
        gathered = trainer.strategy.all_gather(torch.tensor(mine, dtype=torch.float64, device=device) / self._fit.steps)
        return gathered.reshape(-1, 2, len(KINDS)).cpu()


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


def ddps_of(trainer: Trainer) -> list[DistributedDataParallel]:
    """Return every DistributedDataParallel of the strategy, also those around tables that all ranks hold whole."""
    model = trainer.strategy.model
    found = [] if model is None else [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    setup = getattr(trainer.strategy, "table_setup", None)  # TorchRecShardedStrategy's
    if setup is not None:
        for sharded in setup.shards.sharded.values():
            found += ddp_of_whole_tables(sharded)
    return found


def print_table(
    bytes_per_step: Tensor, ranks_on_node: int | None, steps: int, here: bool, console: Console | None = None
) -> None:
    """Print what the ranks send, where `here`. bytes_per_step: (ranks, 2, kinds), see `_of_all_ranks`."""
    if not here:
        return
    ranks = len(bytes_per_step)
    several_nodes = ranks_on_node is not None and ranks_on_node < ranks
    text = TextTable(
        title=f"Sent by a rank per step, {ranks} ranks, {steps} steps",
        title_justify="left",
        caption="Exchanges of ids and rows are counted, all else is what a ring would send.",
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
    """Return a number of bytes in words: 950 B, 12.3 kB, 1.2 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5 or unit == "GB":
            break
        number /= 1000
    return f"{number:.0f} {unit}" if unit == "B" or number >= 99.95 else f"{number:.1f} {unit}"


def _dtype_sent(name: str, arguments: dict[str, Any]) -> torch.dtype:
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
