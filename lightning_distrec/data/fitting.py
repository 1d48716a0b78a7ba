"""Fits columns on row groups by Dask: on the cores of this machine, or on a cluster.

A task counts one statistic in some million rows. Counts that are too many for one process are
shared out by a hash of the value, so that no process needs more memory than a share. Dask moves
results, keeps them on disk where memory is short, and counts again what a worker has lost.
"""

import logging
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lightning_distrec.data.arrow_columns import errors_at
from lightning_distrec.data.columns import Columns
from lightning_distrec.data.row_groups import ParquetReader, RowGroup
from lightning_distrec.data.statistics import Statistic, ValueCounts, limits
from lightning_distrec.errors import ConfigError, DataError, require

if TYPE_CHECKING:
    from distributed import Client, Future

VALUES_FOR_ONE_CORE = 2**26
"""Rows times statistics; more are worth starting processes for."""
TASK_ROWS = 2**21
"""Rows that a task counts."""
SHARE_VALUES = 2**22
"""Different values that one process adds up, of some 500 MiB with what adding them up takes."""
MERGED_AT_ONCE = 16
WORKER_BYTES = 2**31
"""Memory of a local worker."""
WORKER_ENVIRONMENT = {
    "DASK_DISTRIBUTED__WORKER__MEMORY__TARGET": "0.3",
    "DASK_DISTRIBUTED__WORKER__MEMORY__SPILL": "0.5",
}
"""Results go to the disk sooner than by default: torch and tasks take memory, too."""
SILENT_SECONDS = 60
"""How long there may be no worker."""

Numbered = tuple[int, RowGroup]
"""A row group, and its place in the data."""


def is_large(columns: Columns, groups: Sequence[RowGroup]) -> bool:
    """Return whether to fit in several processes: there is enough to count, and Dask is
    installed."""
    num_rows = sum(group.num_rows for group in groups)
    return (
        num_rows * len(columns.statistics()) > VALUES_FOR_ONE_CORE
        and len(os.sched_getaffinity(0)) > 1
        and find_spec("distributed") is not None
    )


@contextmanager
def connected(address: str | None) -> "Iterator[Client]":
    """Yield a client of a Dask scheduler. address: None starts workers here, one for each core.

    Raises ConfigError: no scheduler answers there.
    """
    require("distributed", "fitting columns in several processes")
    from distributed import Client

    if address is None:
        with _local_cluster() as cluster, Client(cluster) as client:
            yield client
        return
    try:
        client = Client(address, timeout=SILENT_SECONDS)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--scheduler {address}: no scheduler of Dask answers within {SILENT_SECONDS} s: "
            f"{error}. Start one by dask scheduler, and workers by dask worker {address}."
        ) from error
    with client:
        yield client


def _local_cluster() -> Any:
    """Return a cluster of this machine's cores. Raises DataError: it cannot be started."""
    from distributed import Scheduler, SpecCluster
    from distributed.deploy.subprocess import SubprocessWorker

    # Processes of their own command: children of multiprocessing run the user's script again.
    options = {
        "nthreads": 1,
        "memory_limit": WORKER_BYTES,
        "env": WORKER_ENVIRONMENT,
        "dashboard": False,
        "silence_logs": logging.ERROR,
    }
    worker = {"cls": SubprocessWorker, "options": {"worker_kwargs": options}}
    # In this process, so that workers end with it, however it ends.
    scheduler = {
        "cls": Scheduler,
        "options": {"host": "127.0.0.1", "dashboard": False, "dashboard_address": ":0"},
    }
    try:
        return SpecCluster(
            workers=dict.fromkeys(range(len(os.sched_getaffinity(0))), worker),
            scheduler=scheduler,
            silence_logs=logging.ERROR,
        )
    except (OSError, RuntimeError) as error:
        raise DataError(f"fitting columns: workers cannot be started here: {error}") from error


def fit_on(
    client: "Client", columns: Columns, reader: ParquetReader, groups: Sequence[RowGroup]
) -> Columns:
    """Fit columns on row groups, and return them: the same as `Columns.fit` on their tables.

    Raises DataError: a value does not fit, or workers died again and again.
    """
    results = columns.vocabularies_of_files()
    statistics = columns.statistics()
    # Workers may have another working directory.
    tasks = _tasks([
        group._replace(file=group.file if "://" in group.file else os.path.abspath(group.file))
        for group in groups
    ])
    _wait_for_worker(client)
    num_rows = sum(group.num_rows for group in groups)
    rank_zero_info(f"fitting {len(statistics)} statistics of {num_rows:,} rows by workers of Dask.")
    stderr = Console(stderr=True)
    bar = (TextColumn("fitting features"), BarColumn(), TimeRemainingColumn())
    with Progress(*bar, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        shown = progress.add_task("", total=len(statistics) * len(tasks))
        run = _Run(client, lambda: progress.advance(shown))
        for key, statistic in statistics.items():
            results[key] = run.fit(statistic, reader, tasks)
    return columns.take(pa.schema(list(reader.types.items())), results)


def _wait_for_worker(client: "Client") -> None:
    from distributed import TimeoutError

    try:
        client.wait_for_workers(1, timeout=SILENT_SECONDS)
    except TimeoutError as error:
        raise DataError(
            f"fitting columns: there has been no worker of Dask for {SILENT_SECONDS} s. Start "
            "some, and fit again."
        ) from error


def _tasks(groups: Sequence[RowGroup]) -> list[list[Numbered]]:
    tasks: list[list[Numbered]] = []
    num_rows = TASK_ROWS
    for numbered in enumerate(groups):
        if num_rows >= TASK_ROWS:
            tasks.append([])
            num_rows = 0
        tasks[-1].append(numbered)
        num_rows += numbered[1].num_rows
    return tasks


class _Run:
    """Runs tasks, and waits for them."""

    def __init__(self, client: "Client", advance: Callable[[], None]) -> None:
        self._client = client
        self._advance = advance

    def fit(
        self, statistic: Statistic, reader: ParquetReader, tasks: list[list[Numbered]]
    ) -> list[Any]:
        """Return the result of a statistic."""
        counted = self._map(
            _count,
            tasks,
            statistic=statistic,
            reader=reader,
        )
        if isinstance(statistic, ValueCounts):
            return self._fit_counts(statistic, counted)
        self._wait(counted, self._advance)
        (merged,) = self._results([self._merge(counted)])
        return merged.result()

    def _fit_counts(self, statistic: ValueCounts, counted: "list[Future]") -> list[str]:
        sizes = self._map(len, counted, priority=1)  # before a count goes to the disk
        self._wait(counted, self._advance)
        num_values = sum(self._results(sizes))
        if num_values > SHARE_VALUES:
            shares = self._shares(counted, -(-num_values // SHARE_VALUES))
        else:
            shares = [self._merge(counted)]
        frequencies = self._results(self._map(ValueCounts.frequencies, shares))
        limits_of_shares = limits(frequencies, statistic.size)
        kept = self._results(self._map(ValueCounts.keep, shares, limits_of_shares))
        kept[0].merge(kept[1:])
        return kept[0].result()

    def _shares(self, counted: "list[Future]", num_shares: int) -> "list[Future]":
        """Return the counts of shares of the values."""
        splits = self._map(ValueCounts.split, counted, num_shares=num_shares)
        parts_of_shares = []
        for number in range(num_shares):
            # Before more is split: what waits on the disk is read as a whole for each share.
            parts_of_shares.append(
                self._map(operator.getitem, splits, [number] * len(splits), priority=1)
            )
        shares: list[Future] = []
        for parts in parts_of_shares:
            shares.append(self._client.submit(_merged, *parts, pure=False))
            # A worker gets the parts of all its tasks, those of later ones too.
            self._wait(shares[: -len(self._client.ncores())])
        return shares

    def _map(
        self, function: Callable[..., Any], *arguments: list[Any], **shared: Any
    ) -> "list[Future]":
        return self._client.map(
            function,
            *arguments,
            **shared,
            pure=False,
        )

    def _merge(self, futures: "list[Future]") -> "Future":
        while len(futures) > 1:
            starts = range(0, len(futures), MERGED_AT_ONCE)
            groups = [futures[first : first + MERGED_AT_ONCE] for first in starts]
            futures = [self._client.submit(_merged, *group, pure=False) for group in groups]
        return futures[0]

    def _results(self, futures: "list[Future]") -> list[Any]:
        self._wait(futures)
        return [future.result() for future in futures]

    def _wait(self, futures: "list[Future]", advance: Callable[[], None] | None = None) -> None:
        """Wait for tasks. Raises DataError: one failed, or there has been no worker for a while."""
        from concurrent.futures import CancelledError

        from distributed import KilledWorker, TimeoutError, wait

        pending = set(futures)
        while pending:
            try:
                done, pending = wait(pending, timeout=SILENT_SECONDS, return_when="FIRST_COMPLETED")
                for future in done:
                    if future.status != "finished":
                        future.result()  # raises what the task raised
                    if advance is not None:
                        advance()
            except TimeoutError:
                _wait_for_worker(self._client)
            except KilledWorker as error:
                raise DataError(
                    f"fitting columns: workers of Dask died again and again: {error}. Give them "
                    f"{WORKER_BYTES >> 30} GiB each."
                ) from error
            except CancelledError as error:
                raise DataError(
                    "fitting columns: the scheduler of Dask ended. Start it, and fit again."
                ) from error


def _count(numbered: list[Numbered], statistic: Statistic, reader: ParquetReader) -> Statistic:
    counted = deepcopy(statistic)  # a worker gives all tasks the same one
    columns: list[str] = []
    for column, feature in counted.columns.items():
        columns += feature.sources(column)
    for number, group in numbered:
        with errors_at(group.place()):
            counted.add(reader.read(group, list(dict.fromkeys(columns))), number)
    counted.merge([])  # adds up what is counted so far
    _give_back_memory()
    return counted


def _merged(first: Statistic, *others: Statistic) -> Statistic:
    merged = deepcopy(first)
    merged.merge(others)
    _give_back_memory()
    return merged


def _give_back_memory() -> None:
    # What Arrow keeps for later counts as the worker's, which Dask would pause or kill.
    pa.default_memory_pool().release_unused()
