"""A picture of a few steps: what a rank computes, what travels meanwhile, and what it waits for."""

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_distrec.callbacks.steps import Clocked, Step, pieces
from lightning_distrec.errors import ConfigError
from lightning_distrec.spans import (
    BACKWARD,
    CONCURRENT,
    FORWARD,
    INPUT_DIST,
    OPTIMIZER,
    OUTPUT_DIST,
    START_INPUT_DIST,
    WAIT_CONTROL_MESSAGE,
    WAIT_DATA,
    WAIT_INPUT_DIST,
    WAIT_OUTPUT_DIST,
    Span,
)

WAITS = (WAIT_DATA, WAIT_INPUT_DIST, WAIT_OUTPUT_DIST, WAIT_CONTROL_MESSAGE)
GROUPS = {
    "computes": ((FORWARD, BACKWARD, OPTIMIZER), ("#2f6fb2", "#5b97cf", "#93bde3")),
    "exchanges": ((START_INPUT_DIST, INPUT_DIST, OUTPUT_DIST), ("#1f7a6d", "#3ba392", "#86c9bd")),
    "waits": (WAITS, ("#c8553d",) * len(WAITS)),
}
"""Group of lanes -> its lanes from top to bottom and their colours."""
KNOWN = [name for names, _ in GROUPS.values() for name in names]
FORMATS = (".png", ".svg", ".pdf")


class Timeline(Clocked):
    """Draws some steps of rank 0 as lanes over time, once, as soon as they have passed. Needs matplotlib.

    Drawing takes about a second, in which the other ranks wait. Strategies that tell no spans give no picture.

    Args:
        path: the picture; its suffix is its format: .png, .svg or .pdf. Folders are made where they are missing.
        first_step: the first batch that is drawn, counted from 0 within a fit.
        steps: number of batches that are drawn.
    """

    def __init__(self, path: str = "timeline.png", first_step: int = 20, steps: int = 4) -> None:
        super().__init__()
        if steps < 1 or first_step < 0:
            raise ConfigError(
                f"Timeline: steps={steps}, first_step={first_step}: at least one step, counted from 0, is drawn."
            )
        if Path(path).suffix not in FORMATS:
            raise ConfigError(f"Timeline: path='{path}' is no picture. End it in {', '.join(FORMATS)}.")
        self._path = Path(path)
        self._first_step = first_step
        self._steps = steps
        self._seen = 0
        self._drawn: list[Step] = []

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise ConfigError where matplotlib is missing."""
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(
                "Timeline draws with matplotlib, which is not installed. Install it (pip install matplotlib), or take "
                "Timeline out of the Trainer's callbacks."
            )
        if trainer.is_global_zero:
            importlib.import_module("matplotlib.figure")  # now, not while the other ranks wait for a step

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._seen, self._drawn = 0, []
        if trainer.is_global_zero:
            self.clock.start()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self.clock.running:
            return
        step = self.clock.end()
        if self._seen >= self._first_step:
            self._drawn.append(step)
        self._seen += 1
        if len(self._drawn) > self._steps:  # one more: what still travelled at the end is told when it has arrived
            self._draw()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.clock.running:  # the fit was shorter than what was to be drawn
            self._draw()

    def _draw(self) -> None:
        self.clock.stop()
        steps, later, self._drawn = self._drawn[: self._steps], self._drawn[self._steps :], []
        if not steps:
            rank_zero_warn(
                f"Timeline: the fit ended after {self._seen} batches, before first_step={self._first_step}; nothing "
                "was drawn. Set a smaller first_step."
            )
        elif not any(step.spans for step in steps):
            rank_zero_warn(
                "Timeline: nothing was told about the time of the steps, so nothing was drawn. Use "
                "strategy='torchrec_sharded'."
            )
        else:
            picture = draw(steps, self._first_step, [span for step in later for span in step.spans])
            self._path.parent.mkdir(parents=True, exist_ok=True)
            picture.savefig(self._path, dpi=130, facecolor="white")
            rank_zero_info(f"Timeline: steps {self._first_step} to {self._first_step + len(steps) - 1}: {self._path}")


def draw(steps: list[Step], first_step: int, later: Sequence[Span] = ()) -> Any:
    """Return a matplotlib Figure of `steps`, which follow one another.

    first_step: the number of the first of them. later: spans that ended after them, and may have begun before.
    """
    from matplotlib.figure import Figure

    told = [*(span for step in steps for span in step.spans), *later]
    spans = _from_zero(pieces(told) + [span for span in told if span.name in CONCURRENT], steps)
    lanes = [
        (group, name, colour)
        for group, (names, colours) in GROUPS.items()
        for name, colour in zip(names, colours, strict=True)
        if any(span.name == name for span in spans)
    ]
    lanes += [("other", name, "#8a8a8a") for name in dict.fromkeys(s.name for s in spans) if name not in KNOWN]
    tops = _tops([group for group, _, _ in lanes])
    figure = Figure(figsize=(11, 1.7 + 0.36 * (tops[-1] + 1)), layout="constrained")
    axes = figure.subplots()
    for (_, name, colour), top in zip(lanes, tops, strict=True):
        own = [span for span in spans if span.name == name]
        if name in WAITS:
            for span in own:
                axes.axvspan(span.begin, span.end, color=colour, alpha=0.1, zorder=-0.5, linewidth=0)
        rows = _in_rows(own)
        height = 0.76 / len(rows)
        for number, row in enumerate(rows):
            bars = [(span.begin, span.seconds) for span in row]
            axes.broken_barh(bars, (top + 0.12 + number * height, height * 0.94), color=colour, linewidth=0)
        ms = sum(span.seconds for span in own) / len(steps)
        axes.annotate(
            f"{ms:.1f}", (1.008, top + 0.5), xycoords=("axes fraction", "data"), va="center", color="#333333", size=9.5
        )
    _frame(axes, steps, first_step, lanes, tops)
    axes.set_title(_title(steps, first_step, spans), loc="left", size=12, color="#111111", pad=24)
    return figure


def _frame(axes: Any, steps: list[Step], first_step: int, lanes: list[tuple[str, str, str]], tops: list[float]) -> None:
    """Lines between steps, names of lanes, and what the axes say."""
    zero = steps[0].begin
    for number, step in enumerate(steps):
        begin, end = 1000 * (step.begin - zero), 1000 * (step.end - zero)
        axes.axvline(end, color="#999999", linewidth=0.8, zorder=0)
        axes.annotate(
            f"step {first_step + number}",
            ((begin + end) / 2, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 5),
            textcoords="offset points",
            ha="center",
            size=9.5,
            color="#333333",
        )
    axes.annotate(
        "ms a step",
        (1.008, 1.0),
        xycoords="axes fraction",
        xytext=(0, 5),
        textcoords="offset points",
        size=9.5,
        color="#333333",
    )
    axes.set_yticks([top + 0.5 for top in tops], [name for _, name, _ in lanes], size=10.5, color="#111111")
    axes.set_ylim(tops[-1] + 1.1, -0.1)
    axes.set_xlim(0, 1000 * (steps[-1].end - zero))
    axes.set_xlabel("ms", color="#333333")
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", colors="#333333")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#999999")


def _from_zero(spans: list[Span], steps: list[Step]) -> list[Span]:
    """Return what of the spans lies within the steps, in ms from their begin."""
    zero, end = steps[0].begin, steps[-1].end
    within = [Span(s.name, max(s.begin, zero), min(s.end, end)) for s in spans if s.begin < end and s.end > zero]
    return [Span(s.name, 1000 * (s.begin - zero), 1000 * (s.end - zero)) for s in within]


def _title(steps: list[Step], first_step: int, spans: list[Span]) -> str:
    step_ms = 1000 * sum(step.seconds for step in steps) / len(steps)
    waited_ms = sum(span.seconds for span in spans if span.name in WAITS) / len(steps)
    last = first_step + len(steps) - 1
    which = f"steps {first_step} to {last}" if len(steps) > 1 else f"step {first_step}"
    return f"Rank 0, {which}: {step_ms:.1f} ms a step, {waited_ms:.1f} ms of it waiting"


def _tops(groups: list[str]) -> list[float]:
    """Return the top of each lane; lanes are 1 high, and groups stand apart."""
    tops: list[float] = []
    for i, group in enumerate(groups):
        gap = 0.35 if group != groups[i - 1] else 0.0
        tops.append(tops[-1] + 1 + gap if tops else 0.0)
    return tops


def _in_rows(spans: list[Span]) -> list[list[Span]]:
    """Deal spans that overlap into rows in which none do."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda s: s.begin):
        row = next((row for row in rows if row[-1].end <= span.begin), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows
