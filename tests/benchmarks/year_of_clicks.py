"""Times of fitting columns on a made-up year of clicks, on a cluster of Dask of two processes.

    python -m tests.benchmarks.year_of_clicks FOLDER [--gigabytes 20] [--days 365]

Writes a Parquet file for each day to FOLDER where there is none, 20 GB in all, with 20 million users
as texts, 2 million items, cities, prices, times and histories. `columns fit` counts all but the
last day; printed are its rows and bytes a second, and the largest memory of a worker.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
from pyarrow import parquet

from lightning_distrec.cli.main import main
from lightning_distrec.data import ColumnData
from lightning_distrec.data.fitting import WORKER_ENVIRONMENT

NUM_USERS = 20_000_000
NUM_ITEMS = 2_000_000
ROW_BYTES = 61
ROWS_PER_GROUP = 2**17
WORKER_GIB = 2
FEATURES = {
    "user": {"kind": "vocabulary", "rows": 10_000_000, "min_count": 2},
    "item": {"kind": "vocabulary", "rows": 1_000_000},
    "city": {"kind": "vocabulary", "rows": 1_000},
    "price": {"kind": "number", "log": True, "standardize": True},
    "price_range": {"kind": "bucketize", "column": "price", "quantiles": 64},
    "hour": {"kind": "time", "column": "time", "part": "hour"},
    "history": {"kind": "vocabulary", "rows": 1_000_000, "table": "item", "max_length": 4},
}


def write_day(folder: Path, num_rows: int, day: int) -> None:
    """Write the clicks of a day, of which half a percent are of users that were not there before."""
    file = folder / f"day={day:03}.parquet"
    if file.exists():
        return
    draw = np.random.default_rng(day)
    # A few users and items have most clicks; each day brings new ones.
    users = (draw.random(num_rows) ** 3 * NUM_USERS * (0.5 + day / 730)).astype(np.int64)
    histories = (draw.random(3 * num_rows) ** 4 * NUM_ITEMS).astype(np.int64)
    seconds = draw.integers(0, 86_400, num_rows) + 86_400 * day + 1_700_000_000
    cities = pa.array([f"city {number}" for number in range(2_000)])
    table = pa.table({
        "time": pa.array(seconds * 1_000_000, pa.timestamp("us")),
        "user": pa.array(users).cast(pa.string()),
        "item": (draw.random(num_rows) ** 4 * NUM_ITEMS).astype(np.int64),
        "city": cities.take(pa.array((draw.random(num_rows) ** 3 * 2_000).astype(np.int64))),
        "price": draw.lognormal(3, 1, num_rows),
        "history": pa.ListArray.from_arrays(
            pa.array(np.arange(num_rows + 1, dtype=np.int32) * 3), pa.array(histories)
        ),
        "clicked": (draw.random(num_rows) < 0.2).astype(np.int8),
    })
    unfinished = file.with_suffix(".unfinished")
    parquet.write_table(table, unfinished, row_group_size=ROWS_PER_GROUP, compression="NONE")
    unfinished.rename(file)


def write_year(folder: Path, gigabytes: float, days: int) -> None:
    """Write the files that are not there yet, with two processes."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = round(gigabytes * 1e9 / ROW_BYTES / days)
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(partial(write_day, folder, rows), range(days)))


class LargestMemory(threading.Thread):
    """Looks at the memory of the workers' processes each 0.1 seconds."""

    def __init__(self, workers: list["subprocess.Popen[bytes]"]) -> None:
        super().__init__(daemon=True)
        self._workers = workers
        self.num_bytes = 0

    def run(self) -> None:
        while all(worker.poll() is None for worker in self._workers):
            for worker in self._workers:
                for process in psutil.Process(worker.pid).children(recursive=True):
                    try:
                        self.num_bytes = max(self.num_bytes, process.memory_info().rss)
                    except psutil.Error:  # it has ended
                        continue
            time.sleep(0.1)


def fit(folder: Path, days: int) -> None:
    """Fit all days but the last, and print what it took."""
    files = [str(folder / f"day={day:03}.parquet") for day in range(days - 1)]
    settings = {"train": files, "features": FEATURES, "label": "clicked"}
    settings["cache_dir"] = str(folder / f"cache {time.time():.0f}")
    job = {
        "model": {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"},
        "data": {"class_path": "lightning_distrec.data.ColumnData", "init_args": settings},
    }
    config = folder / "job.yaml"
    config.write_text(json.dumps(job))
    address = "tcp://127.0.0.1:28786"
    command = [sys.executable, "-m", "dask"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    scheduler = subprocess.Popen(
        [*command, "scheduler", "--host", "127.0.0.1", "--port", "28786", "--no-dashboard"], **quiet
    )
    limits = ["--nthreads", "1", "--memory-limit", f"{WORKER_GIB}GiB", "--no-dashboard"]
    environment = {**os.environ, **WORKER_ENVIRONMENT}
    workers = []
    for _ in range(2):
        started = subprocess.Popen([*command, "worker", address, *limits], env=environment, **quiet)
        workers.append(started)
    largest = LargestMemory(workers)
    largest.start()
    started = time.monotonic()
    try:
        code = main(["columns", "fit", "--config", str(config), "--scheduler", address])
    finally:
        for process in [*workers, scheduler]:
            process.terminate()
    seconds = time.monotonic() - started
    num_rows = sum(parquet.read_metadata(file).num_rows for file in files)
    num_bytes = sum(Path(file).stat().st_size for file in files)
    print(f"exit code {code}: {num_rows:,} rows, {num_bytes / 1e9:.1f} GB in {seconds:.0f} s")
    print(f"{num_rows / seconds / 2:,.0f} rows a second and worker; ", end="")
    print(f"largest memory of a worker {largest.num_bytes / 2**30:.2f} GiB")
    data = ColumnData(**settings)
    data.setup()
    print(f"{len(data.columns.to_plain()['vocabularies']['user']):,} users have a row")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--days", type=int, default=365)
    options = parser.parse_args()
    write_year(options.folder, options.gigabytes, options.days)
    fit(options.folder, options.days)
