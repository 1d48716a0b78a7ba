"""A picture of one step of pipeline_parallel: which stage computes which micro-batch when, and how
long ranks idle."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_distrec.errors import ConfigError, require
from lightning_distrec.observe.steps import Stoppable, all_gather
from lightning_distrec.spans import STAGE_BACKWARD, STAGE_FORWARD, STAGE_LOSS, Span, subscribe

KINDS = (STAGE_FORWARD, STAGE_BACKWARD, STAGE_LOSS)
KIND_NAMES = ("forward", "backward", "loss")
PICTURES = (".svg", ".png", ".pdf")
MIN_SHARE_FOR_NUMBER = 0.015
"""Share of a step's time from which on a bar has the number of its micro-batch."""


@dataclass(frozen=True)
class Work:
    """What a rank computes: a micro-batch of a stage, from `begin` to `end` in seconds."""

    rank: int
    kind: int
    stage: int
    microbatch: int
    begin: float
    end: float


class StageSchedule(Stoppable):
    """Draws one step of every rank of the first pipeline, and compares the time that ranks idle
    with the ideal.

    The picture shows which stage computes which micro-batch when. Its spans are the host's: on a
    GPU they end when work is queued. One step has an exchange more.

    Args:
        path: the picture, a file that ends in .svg, .png or .pdf. Missing folders are created.
            Needs matplotlib, which `[plots]` brings.
        step: the batch that is drawn, counted from 0 within a fit; the first ones are slower than
            others.
    """

    def __init__(self, path: str = "stage_schedule.svg", step: int = 10) -> None:
        require("matplotlib", "StageSchedule")
        if step < 0 or Path(path).suffix not in PICTURES:
            raise ConfigError(
                f"StageSchedule: path={path!r} must end in one of {', '.join(PICTURES)}, and "
                f"step={step} be at least 0."
            )
        self._path = Path(path)
        self._step = step
        self._seen = 0
        self._zero = 0.0
        self._spans: list[Span] = []
        self._unsubscribe: Callable[[], None] | None = None
        self.bubble: float | None = None
        """Share of the ranks' time between the first and the last work of the step in which they
        idle."""
        self.ideal_bubble: float | None = None
        """The same where stages take equal times, and exchanges none."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Collective. Compare the ranks' clocks. Raises ConfigError: the strategy has no stages."""
        if getattr(trainer.strategy, "strategy_name", "") != "pipeline_parallel":
            raise ConfigError(
                "StageSchedule draws stages of strategy='pipeline_parallel' only. Use "
                "PyTorchProfiler."
            )
        self._seen = 0
        self._zero = align_clocks(trainer.strategy.root_device)

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # Subscribed for one step alone: without subscribers spans cost nearly nothing.
        if self._seen == self._step:
            self._spans = []
            self._unsubscribe = subscribe(self._spans.append)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._seen += 1
        # All ranks draw the same batch, by their own count, so that all reach the exchange below.
        if self._unsubscribe is None:
            return
        self.stop()
        # Ranks of other pipelines compute the same with other batches: they are gathered, but not
        # drawn.
        ranks: Any = trainer.strategy.ranks  # type: ignore[attr-defined]
        work = [
            item
            for item in self._gathered(trainer.strategy.root_device)
            if item.rank < ranks.num_ranks
        ]
        microbatches = 1 + max(item.microbatch for item in work)
        self.bubble = idle_share(work, ranks.num_ranks)
        strategy: Any = trainer.strategy
        self.ideal_bubble = strategy.ideal_idle_share(microbatches)
        if trainer.is_global_zero:
            title = (
                f"Step {self._step}: {ranks.num_stages} stages on {ranks.num_ranks} ranks, "
                f"{microbatches} micro-batches; ranks idle {self.bubble:.1%} of the time, ideal "
                f"{self.ideal_bubble:.1%}"
            )
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draw_schedule(work, title).savefig(self._path)
            rank_zero_info(f"StageSchedule: {title}. Drawn in {self._path}.")

    @override
    def stop(self) -> None:
        if self._unsubscribe is not None:
            self._unsubscribe()
            self._unsubscribe = None

    def _gathered(self, device: torch.device) -> list[Work]:
        """Collective. Return the work of all ranks."""
        rows = []
        for span in self._spans:
            # The names end in the stage's and the micro-batch's numbers: see spans.py.
            kind, *numbers = span.name.rsplit(maxsplit=2)
            if kind in KINDS:
                rows.append([
                    KINDS.index(kind),
                    *map(int, numbers),
                    span.begin - self._zero,
                    span.end - self._zero,
                ])
        counts = all_gather(torch.tensor([len(rows)], device=device))
        # all_gather takes equal shapes, and ranks differ: the last stage's rank has spans of the
        # loss too.
        rows += [[0.0] * 5] * (int(max(counts)) - len(rows))
        # float64: an hour after the start float32 resolves a quarter of a millisecond only.
        gathered = all_gather(torch.tensor(rows, dtype=torch.float64, device=device).reshape(-1, 5))
        return [
            Work(rank, int(kind), int(stage), int(microbatch), begin, end)
            for rank, (rank_rows, count) in enumerate(zip(gathered, counts, strict=True))
            for kind, stage, microbatch, begin, end in rank_rows[: int(count)].tolist()
        ]


def align_clocks(device: torch.device, rounds: int = 5) -> float:
    """Collective. Return a moment of this rank's time.perf_counter that is the same moment on all
    ranks.

    All ranks leave a blocking all-reduce at nearly the same time, so the median difference over
    some rounds is the offset between two clocks, to within the time of such an exchange (tens of
    microseconds to a millisecond).
    """
    moments = []
    for _ in range(rounds):
        token = torch.zeros(1, device=device)
        dist.all_reduce(token)
        token.item()  # waits for a GPU
        moments.append(time.perf_counter())
    local = torch.tensor(moments, dtype=torch.float64, device=device)
    gathered = all_gather(local)
    # Rank 0's first moment, in this rank's clock: perf_counter counts from a moment that differs
    # between nodes.
    return float(gathered[0][0]) + float((local - gathered[0]).median())


def idle_share(work: list[Work], num_ranks: int) -> float:
    """Return the share of the ranks' time, from the first work to the last, in which they do none
    of it."""
    seconds = max(item.end for item in work) - min(item.begin for item in work)
    return 1.0 - sum(item.end - item.begin for item in work) / (seconds * num_ranks)


def draw_schedule(work: list[Work], title: str) -> Any:
    """Return a figure: a row for each rank, from left to right what it computes."""
    from matplotlib.figure import Figure  # optional, and slow to import

    begin = min(item.begin for item in work)
    end = max(item.end for item in work)
    num_ranks = 1 + max(item.rank for item in work)
    num_stages = 1 + max(item.stage for item in work)
    figure = Figure(figsize=(10, 1.6 + 0.4 * num_ranks), layout="constrained")
    axes = figure.subplots()
    labels = dict(enumerate(KIND_NAMES))
    for item in work:
        start_ms = 1000 * (item.begin - begin)
        width_ms = 1000 * (item.end - item.begin)
        # A rank with several stages draws its later ones paler: stage s is on rank s modulo ranks.
        paler = 0.5 * (item.stage // num_ranks) / max(1, num_stages // num_ranks)
        axes.barh(
            item.rank,
            width_ms,
            left=start_ms,
            color=f"C{item.kind}",
            alpha=1.0 - paler,
            edgecolor="white",
            label=labels.pop(item.kind, ""),  # each kind once in the legend
            gid=f"{KIND_NAMES[item.kind]}-stage-{item.stage}-micro-batch-{item.microbatch}",
        )
        # Narrower bars have no place for a number.
        if width_ms > MIN_SHARE_FOR_NUMBER * 1000 * (end - begin):
            axes.text(
                start_ms + width_ms / 2, item.rank, str(item.microbatch), ha="center", va="center"
            )
    axes.set_yticks(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(title, loc="left", fontsize="small")
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure
