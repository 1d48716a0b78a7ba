"""Writes the section about estimated steps of docs/performance.md: ten real fits on two ranks
beside their estimates.

    python -m tests.benchmarks.step_times [--rounds N] [--write]

All of it takes about two minutes on two cores that do nothing else. It only prints the section,
unless --write is given; missed aims stand in bold.
"""

import argparse
import os
import statistics
import sys
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, here and in the ranks

import lightning.pytorch as pl  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor  # noqa: E402

from tests.benchmarks.checkpointing_text import with_section  # noqa: E402
from tests.benchmarks.page import table  # noqa: E402
from tests.benchmarks.performance_contenders import Clock, Turn  # noqa: E402
from tests.benchmarks.performance_rows import machine  # noqa: E402
from tests.support.ranks import rank_and_num_ranks, run_on_ranks  # noqa: E402
from tests.support.trainers import make_trainer  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
BEGIN, END = "<!-- estimated steps: begin -->", "<!-- estimated steps: end -->"
NUM_TABLES, ROWS, DIM, POOLING = 8, 100_000, 64, 10
MAX_DIFFERENCE, MIN_CORRELATION = 0.4, 0.95
HEADINGS = [
    *(
        "update",
        "optimizer",
        "sharding type",
        "batch",
        "tables, estimated, ms",
        "the rest, measured",
    ),
    *("sum", "measured, ms", "differ by", "rounds"),
]
TURN = Turn(first=4, counted=8, last=2)


@dataclass(frozen=True)
class Fit:
    """One of the fits."""

    update: str
    optimizer: str
    """A class of torch.optim."""
    sharding_type: str
    batch_size: int
    rows: int = ROWS


FITS = (
    Fit("fused", "SGD", "table_wise", 256),
    Fit("fused", "SGD", "row_wise", 1024),
    Fit("fused", "Adagrad", "column_wise", 1024),
    Fit("sparse", "SGD", "table_wise", 1024),
    Fit("sparse", "SGD", "row_wise", 256),
    Fit("sparse", "Adagrad", "column_wise", 256),
    Fit("dense", "SGD", "column_wise", 256),
    Fit("dense", "Adagrad", "row_wise", 256),
    Fit("dense", "Adam", "table_wise", 1024),
    Fit("dense", "Adam", "row_wise", 1024),
)
"""Three updates, three sharding types, two batch sizes."""


@dataclass
class Timed:
    """A fit, as it was estimated and as it was."""

    fit: Fit
    estimate: float
    """Milliseconds of the slowest rank's tables."""
    rounds: list[list[float]] = field(default_factory=list)
    """Milliseconds of the steps of each round."""
    without_tables: list[float] = field(default_factory=list)
    """Milliseconds of the steps of the same fit without tables: Lightning's loop, and the layer."""

    @property
    def base(self) -> float:
        """The measured step without tables."""
        return quartile(self.without_tables) if self.without_tables else 0.0

    @property
    def milliseconds(self) -> float:
        """The time that a quarter of the steps do not exceed: other load on the machine only
        adds."""
        return quartile([step for steps in self.rounds for step in steps])

    @property
    def difference(self) -> float:
        """The estimate for tables and the measured rest, over the step, less one."""
        return (self.estimate + self.base) / self.milliseconds - 1


def quartile(milliseconds: list[float]) -> float:
    """Return what a quarter of them do not exceed."""
    return float(np.percentile(milliseconds, 25))


class LitTables(pl.LightningModule):
    """Bags of equal tables, and one layer on them."""

    def __init__(self, fit: Fit) -> None:
        super().__init__()
        self.fit = fit
        configs = [
            EmbeddingBagConfig(
                name=f"t{i}", num_embeddings=fit.rows, embedding_dim=DIM, feature_names=[f"f{i}"]
            )
            for i in range(NUM_TABLES)
        ]
        self.ebc = EmbeddingBagCollection(tables=configs)
        self.top = nn.Linear(NUM_TABLES * DIM, 1)

    def training_step(self, batch: tuple[KeyedJaggedTensor, Tensor], batch_idx: int) -> Tensor:
        ids, label = batch
        logits = self.top(self.ebc(ids).values()).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(logits, label)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = getattr(torch.optim, self.fit.optimizer)(
            self.parameters(), lr=0.01
        )
        return optimizer


class LitLayer(LitTables):
    """The layer alone, on numbers as many as bags have."""

    def __init__(self, fit: Fit) -> None:
        super().__init__(replace(fit, rows=1))
        del self.ebc

    def training_step(self, batch: tuple[KeyedJaggedTensor, Tensor], batch_idx: int) -> Tensor:
        label = batch[1]
        logits = self.top(torch.ones(len(label), NUM_TABLES * DIM)).squeeze(-1)
        return nn.functional.binary_cross_entropy_with_logits(logits, label)


def batches(fit: Fit, number: int, rank: int) -> DataLoader:
    """Return `number` batches of a rank, each with POOLING evenly drawn ids per example and
    table."""
    draw = torch.Generator().manual_seed(1 + rank)
    keys, bags = [f"f{i}" for i in range(NUM_TABLES)], NUM_TABLES * fit.batch_size
    drawn = [
        (
            KeyedJaggedTensor(
                keys=keys,
                values=torch.randint(0, fit.rows, (bags * POOLING,), generator=draw),
                lengths=torch.full((bags,), POOLING),
            ),
            torch.randint(0, 2, (fit.batch_size,), generator=draw).float(),
        )
        for _ in range(number)
    ]
    return DataLoader(drawn, batch_size=None)  # type: ignore[arg-type]


class EstimateClock(Clock):
    """Notes the plan's estimate, too."""

    estimate = 0.0

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.estimate = trainer.strategy.run_tables.plan.cost.critical_path  # type: ignore[attr-defined]


def timed(fit: Fit, turn: Turn = TURN) -> tuple[float, list[float]]:
    """Collective. Return the estimate of a fit, and the milliseconds of its steps that count."""
    torch.set_num_threads(1)
    clock = EstimateClock()
    strategy: dict[str, Any] = {
        "embedding_update": fit.update,
        "sharding_types": [fit.sharding_type],
        "tables": {"*": {"pooling_factor": float(POOLING), "min_partition": DIM // 2}},
        "batch_size_per_rank": fit.batch_size,
        "planning": {"bandwidths": "measure"},
    }
    trainer = make_trainer(strategy, callbacks=[clock])
    trainer.fit(LitTables(fit), batches(fit, turn.steps, rank_and_num_ranks()[0]))
    return clock.estimate, turn.times(clock.ticks)


def timed_without_tables(fit: Fit) -> list[float]:
    """Collective. Return the milliseconds of the steps of a fit that has no tables."""
    clock = Clock()
    make_trainer(callbacks=[clock]).fit(
        LitLayer(fit), batches(fit, TURN.steps, rank_and_num_ranks()[0])
    )
    return TURN.times(clock.ticks)


def take_turns(rounds: int) -> list[Timed]:
    """Collective. Run all fits, round by round."""
    actual = []
    for number in range(rounds):
        for i, fit in enumerate(FITS):
            estimate, steps = timed(fit)
            if not number:
                actual.append(Timed(fit, estimate))
            actual[i].rounds.append(steps)
            actual[i].without_tables += timed_without_tables(fit)
    return actual


def correlation(actual: list[Timed]) -> float:
    """Return Pearson's, of estimates with the measured rest, and steps."""
    return float(
        np.corrcoef(
            [first.estimate + first.base for first in actual],
            [first.milliseconds for first in actual],
        )[0, 1]
    )


def section(actual: list[Timed], when: str) -> str:
    """Return the section, lines that mark it included. when: the date, and the load."""
    off = sum(abs(first.difference) > MAX_DIFFERENCE for first in actual)
    correlated = correlation(actual)
    seen = f"{correlated:.3f}" if correlated >= MIN_CORRELATION else f"**{correlated:.3f}**"
    worst = max(actual, key=lambda first: abs(first.difference)).difference
    return "\n\n".join([
        BEGIN,
        "## Estimated and measured steps",
        f"""\
Ten fits on two ranks with measured bandwidths. The slowest rank's estimated time for tables is added to the measured
step of the same fit without tables (Lightning's loop, one layer, DDP), and compared with the measured step.
`python -m tests.benchmarks.step_times` writes this section and its numbers, {when}, on {machine()}.
{NUM_TABLES} tables of {ROWS:,} x {DIM}, {POOLING} ids per example, and one layer.""",
        table(
            HEADINGS,
            [_line(first) for first in actual],
            3,
        ),
        f"""\
They correlate at {seen} (aim: at least {MIN_CORRELATION}). {f"**{off}**" if off else "None"} of {len(actual)} differ by
more than {MAX_DIFFERENCE:.0%}, the worst by {worst:+.0%}. Measured are first quartiles of
{len(actual[0].rounds)} rounds of {TURN.counted} steps, all of Lightning included; "rounds" are
medians of the fastest and slowest round.""",
        END,
    ])


def _line(first: Timed) -> list[str]:
    fit, medians = first.fit, [statistics.median(steps) for steps in first.rounds]
    differ = f"{first.difference:+.0%}"
    return [
        fit.update,
        fit.optimizer,
        fit.sharding_type,
        str(fit.batch_size),
        f"{first.estimate:.1f}",
        f"{first.base:.1f}",
        f"{first.estimate + first.base:.1f}",
        f"{first.milliseconds:.1f}",
        f"**{differ}**" if abs(first.difference) > MAX_DIFFERENCE else differ,
        f"{min(medians):.1f} to {max(medians):.1f}",
    ]


def main() -> int:
    """Measure, print, and write the section."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each fit")
    parser.add_argument("--write", action="store_true", help=f"put the section into {PAGE.name}")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    actual: list[Timed] = run_on_ranks(take_turns, 2, options.rounds, timeout_seconds=900)[0]
    text = section(actual, f"on {date.today()} at a load of {load:.1f}")
    print(text)
    if options.write:
        PAGE.write_text(with_section(PAGE.read_text("utf-8"), text, BEGIN, END), "utf-8")
    return 0


if __name__ == "__main__":
    # By its full name, so that what ranks return is not a class of `__main__`.
    from tests.benchmarks import step_times

    sys.exit(step_times.main())
