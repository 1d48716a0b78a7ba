"""How fast columns become batches: Criteo's 40 columns by ColumnData, by a loop written by hand,
and read only.

    python -m tests.benchmarks.column_batches [--examples 500000] [--rounds 5] [--batch-size 1024]
    [--bags 1]

One process, one thread, a Parquet file in the page cache; all take turns, and the median of their
rounds counts. Time is processor time, workers' included, but for their start. --bags 1: lists of 1
to 100 values, 214 an example.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from pyarrow import compute, parquet
from torchrec import KeyedJaggedTensor

from lightning_distrec.data import ColumnData, Hash, Number
from recipes.criteo_dlrm.columns import CATEGORIES, COLUMNS, INTEGERS, LABEL, MLPERF_BAG_SIZES
from recipes.criteo_dlrm.write_logs import write_logs

ROWS = 1_000_000
"""Of each table."""


def cpu_seconds() -> float:
    """Return the processor time of this process and of its workers."""
    stats = [
        Path(f"/proc/{child.pid}/stat").read_text().rpartition(") ")[2]
        for child in active_children()
    ]
    ticks = sum(int(tick) for stat in stats for tick in stat.split()[11:13])
    return sum(os.times()[:4]) + ticks / os.sysconf("SC_CLK_TCK")


def scan(file: Path, batch_size: int) -> int:
    """Read all columns into memory, and nothing else: what no reader can beat."""
    opened = parquet.ParquetFile(file)
    groups = range(opened.metadata.num_row_groups)
    return sum(
        opened.read_row_group(group, list(COLUMNS), use_threads=False).num_rows for group in groups
    )


def write_by_hand(file: Path, batch_size: int) -> int:
    """Hash with pandas and fill batches, as one does without a library: no shuffling, no ranks, no
    position."""
    opened, count = parquet.ParquetFile(file), 0
    for group in range(opened.metadata.num_row_groups):
        table = opened.read_row_group(group, list(COLUMNS), use_threads=False)
        bags = [hash_by_hand(table[name].combine_chunks()) for name in CATEGORIES]
        frame = table.select([LABEL, *INTEGERS]).to_pandas()
        dense = np.log1p(frame[list(INTEGERS)].fillna(0).clip(lower=0).to_numpy(np.float32))
        label = frame[LABEL].to_numpy(np.float32)
        for first in range(0, len(frame), batch_size):
            stop = min(first + batch_size, len(frame))
            values = np.concatenate([ids[ends[first] : ends[stop]] for ids, ends in bags])
            lengths = np.concatenate([np.diff(ends[first : stop + 1]) for _, ends in bags]).astype(
                np.int32
            )
            KeyedJaggedTensor(
                list(CATEGORIES), torch.from_numpy(values), lengths=torch.from_numpy(lengths)
            )
            torch.from_numpy(dense[first:stop])
            count += len(torch.from_numpy(label[first:stop]))
    return count


def hash_by_hand(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return ids, and where those of each row begin and end."""
    ends = np.arange(len(column) + 1)
    if pa.types.is_list(column.type):
        ends = np.append(
            0, compute.fill_null(compute.list_value_length(column), 0).to_numpy().cumsum()
        )
        column = column.flatten()
    texts = column.to_numpy(zero_copy_only=False)
    ids = np.where(pd.isna(texts), 0, 1 + pd.util.hash_array(texts, categorize=False) % (ROWS - 1))
    return ids.astype(np.int64), ends


class Loader:
    """An epoch of ColumnData's training batches, shuffled."""

    def __init__(self, file: Path, batch_size: int, bags: bool, num_workers: int) -> None:
        sizes = MLPERF_BAG_SIZES if bags else (None,) * len(CATEGORIES)
        features = {
            name: Hash(rows=ROWS, max_length=size)
            for name, size in zip(CATEGORIES, sizes, strict=True)
        }
        features |= {name: Number(log=True) for name in INTEGERS}
        options = {
            "batch_size": batch_size,
            "num_workers": num_workers,
            "cache_dir": str(file.parent),
        }
        data = ColumnData(str(file), features, LABEL, **options)
        data.prepare_data()
        data.setup()
        self._batches = data.train_dataloader()

    def __call__(self, file: Path, batch_size: int) -> int:
        """Return how many examples the batches have."""
        self._batches.sampler.set_epoch(self._batches.sampler.epoch + 1)
        return sum(len(batch["label"]) for batch in self._batches)


def main() -> None:
    """Print examples a second."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("examples", 500_000), ("rounds", 5), ("batch-size", 1024), ("bags", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    with tempfile.TemporaryDirectory() as folder:
        file, bags = Path(folder, "day.parquet"), bool(options.bags)
        write_logs(str(file), options.examples, multi_hot=bags)
        contenders: dict[str, Callable[[Path, int], int]] = {
            "pyarrow reads": scan,
            "ColumnData": Loader(file, options.batch_size, bags, 0),
            "ColumnData, 1 worker": Loader(file, options.batch_size, bags, 1),
            "by hand": write_by_hand,
        }
        speeds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(1 + options.rounds):
            for name, contender in contenders.items():
                begin, count = cpu_seconds(), contender(file, options.batch_size)
                assert count == options.examples
                speeds[name].append(count / (cpu_seconds() - begin))
    # The first round starts workers.
    reading = statistics.median(speeds["pyarrow reads"][1:])
    for name, rounds in speeds.items():
        median = statistics.median(rounds[1:])
        print(f"{name:20} {median:12,.0f} examples/s of a core   {median / reading:.2f} of reading")


if __name__ == "__main__":
    main()
