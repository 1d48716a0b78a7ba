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

from lightning_distrec.callbacks.steps import Stoppable, all_gather
from lightning_distrec.errors import ConfigError
from lightning_distrec.spans import STAGE_BACKWARD, STAGE_FORWARD, STAGE_LOSS, Span, subscribe

KINDS = (STAGE_FORWARD, STAGE_BACKWARD, STAGE_LOSS)
COLORS = ("#4c9be8", "#f0a04b", "#8bc48a")
# Pixels: the picture's width, the height of a rank's row, and the margins for ranks' names and the
# title.
WIDTH, ROW, MARGIN, TOP = 960, 34, 70, 46


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

    Its spans are the host's: on a GPU they end when work is queued. One step has an exchange more.

    Args:
        path: the picture, a file that ends in .svg. Missing folders are created.
        step: the batch that is drawn, counted from 0 within a fit; the first ones are slower than
            others.
    """

    def __init__(self, path: str = "stage_schedule.svg", step: int = 10) -> None:
        if step < 0 or Path(path).suffix != ".svg":
            raise ConfigError(
                f"StageSchedule: path={path!r} must end in .svg, and step={step} be at least 0."
            )
        self._path, self._step = Path(path), step
        self._seen, self._zero = 0, 0.0
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
                "StageSchedule draws stages of strategy='pipeline_parallel' only. "
                "Use PyTorchProfiler."
            )
        self._seen, self._zero = 0, align_clocks(trainer.strategy.root_device)

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
        self.ideal_bubble = trainer.strategy.ideal_idle_share(microbatches)  # type: ignore[attr-defined]
        if trainer.is_global_zero:
            title = (
                f"Step {self._step}: {ranks.num_stages} stages on {ranks.num_ranks} ranks, "
                f"{microbatches} micro-batches"
                f"; ranks idle {self.bubble:.1%} of the time, ideal {self.ideal_bubble:.1%}"
            )
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(draw_schedule(work, title))
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


def draw_schedule(work: list[Work], title: str) -> str:
    """Return an SVG: a row for each rank, from left to right what it computes."""
    begin, end = min(item.begin for item in work), max(item.end for item in work)
    scale = (WIDTH - MARGIN - 10) / (end - begin)
    rows = 1 + max(item.rank for item in work)
    num_stages = 1 + max(item.stage for item in work)
    height = TOP + rows * ROW + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-size="12" '
        'font-family="Arial">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/><text x="10" y="20" '
        f'font-size="13">{title}</text>',
    ]
    for rank, y in enumerate(range(TOP, TOP + rows * ROW, ROW)):
        parts.append(f'<text x="10" y="{y + 19}">rank {rank}</text>')
        parts.append(
            f'<rect x="{MARGIN}" y="{y}" width="{WIDTH - MARGIN - 10}" '
            f'height="{ROW - 6}" fill="#e9edf1"/>'
        )
    for item in work:
        # A rank with several stages draws its later ones paler: stage s is on rank s modulo ranks.
        x, width = MARGIN + (item.begin - begin) * scale, (item.end - item.begin) * scale
        y, opacity = (
            TOP + item.rank * ROW,
            1.0 - 0.5 * (item.stage // rows) / max(1, num_stages // rows),
        )
        name = f"{KINDS[item.kind]}, stage {item.stage}, micro-batch {item.microbatch}"
        parts.append(
            f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.5):.2f}" height="{ROW - 6}" '
            f'fill="{COLORS[item.kind]}" '
            f'fill-opacity="{opacity:.2f}" stroke="white" stroke-width="0.5">'
            f"<title>{name}: {1000 * (item.end - item.begin):.2f} ms</title></rect>"
        )
        # Narrower bars have no place for a number. All have a title, which browsers show at the
        # pointer.
        if width > 14:
            parts.append(
                f'<text x="{x + width / 2:.2f}" y="{y + 18}" '
                f'text-anchor="middle">{item.microbatch}</text>'
            )
    y = TOP + rows * ROW + 8
    for i, (kind, color) in enumerate(zip(("forward", "backward", "loss"), COLORS, strict=True)):
        x = MARGIN + 110 * i
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" fill="{color}"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 12}">{kind}</text>')
    parts.append(
        f'<text x="{WIDTH - 10}" y="{y + 12}" '
        f'text-anchor="end">{1000 * (end - begin):.1f} ms</text></svg>'
    )
    return "\n".join(parts) + "\n"
