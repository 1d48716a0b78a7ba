"""Measures how fast ColumnData makes batches, over pyarrow's bare reading of the same columns.

    python -m tests.benchmarks.reading [--workers 0 1 2] [--rounds 7] [--quick] [--write]

Epochs of one loader for each number of workers take turns with scans: pyarrow reads the columns by
row groups in one thread. Criteo's columns are 13 numbers and 26 texts; the others are texts,
numbers and lists of texts. "Processor" compares processor times, which other load on the machine
disturbs less; by several threads no value above 1 can be expected there. At the end two ranks train
criteo's CPU recipe: how much of their steps is waiting for the next batch.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml
from pyarrow import parquet

from lightning_distrec.data import ColumnData
from lightning_distrec.data.row_order import RowLoader
from recipes.criteo_dlrm.data import CriteoDataModule
from recipes.criteo_dlrm.model import ClickModel
from tests.benchmarks.report import Report, Row, ratio_row, start, table
from tests.benchmarks.turns import in_silence, turns
from tests.support.ranks import run_on_ranks
from tests.support.trainers import make_trainer

SCAN = "scan"
RECIPE = Path(__file__).parents[2] / "recipes" / "criteo_dlrm" / "cpu.yaml"
AIMS = {1: 0.6, 2: 1.0}
"""Workers -> of the scan's rows per second, by the wall's clock."""
MAX_WAITING = 0.02
MAX_FIRST_SECONDS = 3
HEADER = [
    *("data", "workers", "rows/s", "of the scan", "us of processor a row", "of the scan's"),
    "first batch, s",
]


@dataclass
class Passes:
    """Passes over all rows."""

    wall: list[float] = field(default_factory=list)
    """Rows per second."""
    processor: list[float] = field(default_factory=list)
    """Microseconds of processor time a row, of all threads."""
    first: list[float] = field(default_factory=list)
    """Seconds until the first batch."""


class TimedLoader(RowLoader):
    """Notes the seconds in which whoever iterates waits for a batch."""

    waits: list[float]
    began: float

    def __iter__(self) -> Iterator[Any]:
        self.waits = []
        self.began = time.perf_counter()
        batches = super().__iter__()
        while True:
            asked = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                return
            self.waits.append(time.perf_counter() - asked)
            yield batch


class TimedCriteo(CriteoDataModule):
    """The recipe's data, with a loader that is timed."""

    loader: TimedLoader

    def train_dataloader(self) -> RowLoader:
        """Rows in random order."""
        loader: Any = super().train_dataloader()
        loader.__class__ = TimedLoader
        self.loader = loader
        return loader


def criteo(folder: str, num_rows: int, num_workers: int) -> ColumnData:
    """Return generated clicks with criteo's columns, all of which train."""
    return TimedCriteo(
        cache_dir=folder,
        num_examples=num_rows,
        num_workers=num_workers,
        val_fraction=1e-3,
        test_fraction=1e-3,
    )


def lists(folder: str, num_rows: int, num_workers: int) -> ColumnData:
    """Return visits with texts, numbers, and lists of texts."""
    file = Path(folder, "visits.parquet")
    if not file.exists():
        parquet.write_table(visits(num_rows), file, row_group_size=65_536)
    features = {
        "user": {"kind": "hash", "rows": 100_000},
        "city": {"kind": "vocabulary", "rows": 1_000},
        "history": {"kind": "hash", "rows": 50_000, "max_length": 20},
        "tags": {"kind": "vocabulary", "rows": 500, "max_length": 5, "separator": "|"},
        "time": {"kind": "time", "part": "hour"},
        "price": {"kind": "number", "log": True, "standardize": True},
    }
    return ColumnData(str(file), features, "clicked", num_workers=num_workers, cache_dir=folder)


def visits(num_rows: int) -> pa.Table:
    """Return made-up visits."""
    draw = np.random.default_rng(1)
    lengths = draw.integers(0, 40, num_rows)
    items = draw.zipf(1.2, lengths.sum()) % 100_000
    names = pa.array([f"item{item}" for item in range(100_000)]).take(pa.array(items))
    ends = np.append(0, np.cumsum(lengths)).astype(np.int32)
    return pa.table({
        "user": [f"user{user}" for user in draw.zipf(1.2, num_rows) % 1_000_000],
        "city": [f"city{city}" for city in draw.integers(0, 900, num_rows)],
        "history": pa.ListArray.from_arrays(ends, names),
        "tags": [
            "|".join(f"t{tag}" for tag in tags) for tags in draw.integers(0, 400, (num_rows, 3))
        ],
        "time": pa.array(draw.integers(0, 2**31, num_rows)).cast(pa.timestamp("s")),
        "price": draw.lognormal(3, 1, num_rows),
        "clicked": draw.integers(0, 2, num_rows),
    })


def scan(loader: Any) -> Iterator[int]:
    """Yield the rows of each row group, once pyarrow has read its columns."""
    dataset = loader.dataset
    files = {group.file: parquet.ParquetFile(group.file) for group in dataset.groups}
    for group in dataset.groups:
        columns = files[group.file].read_row_group(
            group.number, columns=dataset.names, use_threads=False
        )
        yield columns.num_rows


def epoch(loader: Any) -> Iterator[int]:
    """Yield the rows of each batch."""
    loader.sampler.set_epoch(loader.sampler.epoch + 1)
    for batch in loader:
        yield len(batch["label"])


def time_pass(sizes: Iterator[int], passes: Passes) -> None:
    """Note the times of one pass."""
    began = time.perf_counter()
    processor = time.process_time()
    num_rows = next(sizes)
    passes.first.append(time.perf_counter() - began)
    num_rows += sum(sizes)
    passes.wall.append(num_rows / (time.perf_counter() - began))
    passes.processor.append(1e6 * (time.process_time() - processor) / num_rows)


def time_passes(make: Callable[..., ColumnData], rows: int, options: Any) -> dict[str, Passes]:
    """Return the passes of the scan, and of each number of workers; the first round warms up."""
    loaders: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for num_workers in options.workers:
            data = make(folder, rows, num_workers)
            data.prepare_data()
            data.setup()
            loaders[str(num_workers)] = data.train_dataloader()
            loaders[str(num_workers)].pin_memory = False
        passes = {name: Passes() for name in (SCAN, *loaders)}
        for name in turns(list(passes), options.rounds + 1):
            sizes = epoch(loaders[name]) if name in loaders else scan(next(iter(loaders.values())))
            time_pass(sizes, passes[name])
    return passes


def waiting_share(folder: str, num_rows: int, num_workers: int) -> float:
    """Collective. Return the share of the wall's time in which criteo's recipe waits for batches,
    without the first."""
    settings = yaml.safe_load(RECIPE.read_text())["model"]["init_args"]
    data = TimedCriteo(
        cache_dir=folder, num_examples=num_rows, max_rows=100_000, num_workers=num_workers
    )
    with in_silence():
        trainer = make_trainer(limit_val_batches=0)
        trainer.fit(ClickModel(**settings), data)
    waits = data.loader.waits
    seconds = time.perf_counter() - data.loader.began - waits[0]
    return sum(waits[1:]) / seconds


def lines_of(name: str, passes: dict[str, Passes]) -> list[list[str]]:
    """Return lines of the table: medians of the rounds."""
    lines = []
    scanned = passes[SCAN]
    for contender, measured in passes.items():
        wall = ratio_row("", measured.wall[1:], scanned.wall[1:]).value or 0
        processor = ratio_row("", scanned.processor[1:], measured.processor[1:]).value or 0
        lines.append([
            name,
            contender,
            f"{statistics.median(measured.wall[1:]):,.0f}",
            f"{wall:.2f}",
            f"{statistics.median(measured.processor[1:]):.2f}",
            f"{processor:.2f}",
            f"{measured.first[0]:.2f}",
        ])
    return lines


def aims_of(name: str, passes: dict[str, Passes]) -> list[Row]:
    """Return what is promised of criteo's columns."""
    scanned = passes[SCAN].wall[1:]
    rows = []
    for contender in passes.keys() - {SCAN}:
        first = passes[contender].first[0]
        rows.append(Row(f"{name}, {contender} workers: first batch, s", first, MAX_FIRST_SECONDS))
        aim = AIMS.get(int(contender))
        ratios = [
            wall / other for wall, other in zip(passes[contender].wall[1:], scanned, strict=True)
        ]
        median = statistics.median(ratios)
        label = f"{name}, {contender} workers: of the scan"
        rows.append(Row(label, median, aim, at_least=True, rounds=ratios))
    return sorted(rows, key=lambda row: row.name)


def time_waits(report: Report, num_rows: int) -> None:
    """Train the recipe on two ranks, and add the share of waiting of the slower one."""
    with tempfile.TemporaryDirectory() as folder:
        for num_workers in report.options.workers:
            arguments = (waiting_share, 2, folder, num_rows, num_workers)
            shares = report.attempt(
                f"{num_workers} workers, training", run_on_ranks, *arguments, timeout_seconds=900
            )
            if shares is not None:
                name = f"criteo's steps, {num_workers} workers: share of waiting"
                report.rows.append(Row(name, max(shares), MAX_WAITING, rounds=shares))


def main() -> int:
    """Measure, print, and write the results; returns the exit status."""
    report = start(
        "reading",
        __doc__,
        workers={"nargs": "+", "type": int, "default": [0, 1, 2]},
        rounds={"type": int, "default": 7, "help": "turns that count"},
    )
    options = report.options
    num_rows = 200_000 if options.quick else 2_000_000
    if options.quick:
        options.rounds = 2
    lines = []
    for name, make, rows in (("criteo", criteo, num_rows), ("lists", lists, num_rows // 4)):
        passes = report.attempt(name, time_passes, make, rows, options)
        if passes is not None:
            lines += lines_of(name, passes)
            report.rows += aims_of(name, passes)
    time_waits(report, num_rows // 4)
    report.sections.append(table(HEADER, lines, 2))
    return report.finish()


if __name__ == "__main__":
    # By its full name, so that what ranks return is not a class of `__main__`.
    from tests.benchmarks import reading

    sys.exit(reading.main())
