"""How fast columns become batches: Criteo's 40 columns by ColumnData, by a loop written by hand, and read only.

    python -m tests.benchmarks.column_batches [--examples 500000] [--rounds 5] [--batch-size 1024]

One process, one thread, a Parquet file in the page cache; the three take turns, and the median of their rounds counts.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from pyarrow import parquet
from torchrec import KeyedJaggedTensor

from lightning_distrec.data import ColumnData
from recipes.criteo_dlrm.columns import CATEGORIES, INTEGERS
from recipes.criteo_dlrm.read_logs import COLUMNS, LABEL
from recipes.criteo_dlrm.write_logs import write_logs

ROWS = 1_000_000
"""Of each table."""


def scan(file: Path, batch_size: int) -> int:
    """Read all columns into memory, and nothing else: what no reader can beat."""
    opened = parquet.ParquetFile(file)
    groups = range(opened.metadata.num_row_groups)
    return sum(opened.read_row_group(group, list(COLUMNS), use_threads=False).num_rows for group in groups)


def write_by_hand(file: Path, batch_size: int) -> int:
    """Hash with pandas and fill batches, as one does without a library: no shuffling, no ranks, no position."""
    opened, count = parquet.ParquetFile(file), 0
    for group in range(opened.metadata.num_row_groups):
        frame = opened.read_row_group(group, list(COLUMNS), use_threads=False).to_pandas()
        ids = [
            np.where(
                frame[name].isna(), 0, 1 + pd.util.hash_array(frame[name].to_numpy(), categorize=False) % (ROWS - 1)
            )
            for name in CATEGORIES
        ]
        tokens = np.stack(ids).astype(np.int64)
        dense = np.log1p(frame[list(INTEGERS)].fillna(0).clip(lower=0).to_numpy(np.float32))
        label = frame[LABEL].to_numpy(np.float32)
        for first in range(0, len(frame), batch_size):
            cells = tokens[:, first : first + batch_size]
            values, lengths = torch.from_numpy(cells.ravel()), torch.ones(cells.size, dtype=torch.int32)
            KeyedJaggedTensor(keys=list(CATEGORIES), values=values, lengths=lengths)
            torch.from_numpy(dense[first : first + batch_size])
            count += len(torch.from_numpy(label[first : first + batch_size]))
    return count


class Loader:
    """An epoch of ColumnData's training batches, shuffled."""

    def __init__(self, file: Path, folder: Path) -> None:
        features = {name: {"kind": "hash", "rows": ROWS} for name in CATEGORIES}
        features |= {name: {"kind": "number", "log": True} for name in INTEGERS}
        self._options = {"train": str(file), "features": features, "label": LABEL, "cache_dir": str(folder)}

    def __call__(self, file: Path, batch_size: int) -> int:
        """Return how many examples the batches have."""
        data = ColumnData(**self._options, batch_size=batch_size)
        data.prepare_data()
        data.setup()
        return sum(len(batch["label"]) for batch in data.train_dataloader())


def main() -> None:
    """Print examples a second."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("examples", 500_000), ("rounds", 5), ("batch-size", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pa.set_cpu_count(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "day.parquet")
        write_logs(str(file), options.examples)
        contenders: dict[str, Callable[[Path, int], int]] = {
            "pyarrow reads": scan,
            "ColumnData": Loader(file, Path(folder)),
            "by hand": write_by_hand,
        }
        speeds: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(options.rounds):
            for name, contender in contenders.items():
                begin, count = time.process_time(), contender(file, options.batch_size)
                assert count == options.examples
                speeds[name].append(count / (time.process_time() - begin))
    reading = statistics.median(speeds["pyarrow reads"])
    for name, rounds in speeds.items():
        median = statistics.median(rounds)
        print(f"{name:14} {median:12,.0f} examples/s of a core   {median / reading:.2f} of reading")


if __name__ == "__main__":
    main()
