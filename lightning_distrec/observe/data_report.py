"""Shows what each rank reads at the start of a fit."""

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.table import Table
from typing_extensions import override

from lightning_distrec.batches import RankReports, ids_by_feature
from lightning_distrec.errors import ConfigError
from lightning_distrec.observe.steps import log
from lightning_distrec.observe.throughput import SampleCounter
from lightning_distrec.units import text_table

WAIT_SECONDS = 60.0
"""How long rank 0 waits at the end of a fit for reports that are not there yet."""
MAX_FEATURES = 8


class DataReport(Callback):
    """Prints a table of what each rank has read in the first batches of a fit, and logs it as
    `data/rank_0/samples`, `data/rank_0/user_min` and so on.

    For each rank: its device, the samples of its first batch and of all batches that count, and for
    each feature (keys of KeyedJaggedTensors, other tensors of integers) the smallest and the
    largest id; the table shows the first 8 features. Nothing is waited for. Without it, a warning
    names the ranks whose first two batches are equal, where an IterableDataset is not divided.

    Args:
        num_batches: how many batches of each rank count.
        samples_from: as in `Throughput`.
    """

    def __init__(self, num_batches: int = 1, samples_from: str | None = None) -> None:
        super().__init__()
        if num_batches < 1:
            raise ConfigError(f"DataReport: num_batches={num_batches} must be at least 1.")
        self._num_batches = num_batches
        self._counter = SampleCounter(samples_from, "DataReport")
        self._reports: RankReports | None = None
        self._ranges: dict[str, list[int]] = {}
        self._samples: list[int | None] = []
        self.rows: list[dict[str, Any]] = []
        """What is in the table, on rank 0: rank, device, batch_size and samples (None: unknown),
        and ids, a list [smallest, largest] by feature."""

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        self._counter.start(trainer.train_dataloader, datamodule)
        self._reports = RankReports()
        self._ranges = {}
        self._samples = []
        self.rows = []

    @override
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._reports is None:
            return
        if len(self._samples) < self._num_batches:
            self._add(batch)
            if len(self._samples) == self._num_batches:
                self._put(trainer)
        elif not trainer.is_global_zero:
            self._reports = None
        else:
            self._show(trainer)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._reports is None or not self._samples:
            return
        if len(self._samples) < self._num_batches:
            self._put(trainer)
        deadline = time.monotonic() + WAIT_SECONDS
        while trainer.is_global_zero and not self.rows and time.monotonic() < deadline:
            self._show(trainer)
            time.sleep(0.01)

    def _add(self, batch: Any) -> None:
        self._samples.append(self._counter.count(batch))
        for name, ids in ids_by_feature(batch).items():
            if ids.numel():
                low = int(ids.min())
                high = int(ids.max())
                earlier = self._ranges.get(name, [low, high])
                self._ranges[name] = [min(low, earlier[0]), max(high, earlier[1])]

    def _put(self, trainer: Trainer) -> None:
        assert self._reports is not None
        row = {
            "rank": trainer.global_rank,
            "device": str(trainer.strategy.root_device),
            "ids": self._ranges,
        }
        samples = None if None in self._samples else sum(filter(None, self._samples))
        self._reports.put(row | {"batch_size": self._samples[0], "samples": samples})

    def _show(self, trainer: Trainer) -> None:
        assert self._reports is not None
        rows = self._reports.take()
        if rows is None:
            return
        self.rows = rows
        self._reports = None
        for row in rows:
            numbers = {
                name: row[name] for name in ("batch_size", "samples") if row[name] is not None
            }
            for name, (low, high) in row["ids"].items():
                numbers |= {f"{name}_min": low, f"{name}_max": high}
            log(
                trainer,
                {
                    f"data/rank_{row['rank']}/{name}": float(number)
                    for name, number in numbers.items()
                },
            )
        Console().print(_table(rows, self._num_batches))


def _table(rows: list[dict[str, Any]], num_batches: int) -> Table:
    """Return a line for each rank and feature: names of features may be longer than columns can be
    wide."""
    title = (
        f"Read in the first {num_batches} batches" if num_batches > 1 else "Read in the first batch"
    )
    headings = ("rank", "device", "batch size", "samples", "feature", "ids")
    table = text_table(headings, ["device", "feature"], title=title)
    for row in rows:
        counts = [
            "unknown" if row[name] is None else f"{row[name]:,}"
            for name in ("batch_size", "samples")
        ]
        cells = [str(row["rank"]), row["device"], *counts]
        for name, (low, high) in list(row["ids"].items())[:MAX_FEATURES]:
            table.add_row(*cells, name, f"{low:,} to {high:,}")
            cells = [""] * len(cells)
        if cells[0]:
            table.add_row(*cells)
    num_others = max(len(row["ids"]) for row in rows) - MAX_FEATURES
    if num_others > 0:
        table.caption = f"{num_others} more features are logged"
    return table
