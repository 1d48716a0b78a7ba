"""Makes batches of places in an epoch's order, from windows of rows that threads read and encode
ahead of the batches."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import tee

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset

from lightning_distrec.data.arrow_columns import errors_at
from lightning_distrec.data.columns import Columns
from lightning_distrec.data.raw_values import BLOCK, WORD, Encoded, offsets_of, places
from lightning_distrec.data.row_groups import Reader, RowGroup
from lightning_distrec.data.row_order import Request, RowOrder, Window


class EncodedRows(Dataset):
    """Makes batches of places in an epoch's order."""

    def __init__(
        self,
        reader: Reader,
        groups: list[RowGroup],
        columns: Columns,
        order: RowOrder,
        names: list[str],
    ) -> None:
        """names: the columns to read."""
        self.reader = reader
        self.groups = groups
        self.columns = columns
        self.order = order
        self.names = names
        self.keep: list[str] = []
        """Columns that are written beside predictions."""

    def batches(
        self, requests: Iterator[Request], num_threads: int
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the tensors of each request's batch.

        num_threads: how many read ahead, each a block of the requests, which take turns; 0: the
        calling thread reads what a batch needs.
        """
        ahead, requests = tee(requests)
        windows = _Windows(self, ahead, num_threads)
        try:
            for number, request in enumerate(requests):
                yield self._batch(request, windows, number % max(1, num_threads))
        finally:
            windows.close()

    def _batch(self, request: Request, windows: "_Windows", block: int) -> dict[str, torch.Tensor]:
        parts = []
        num_rows = 0
        for window, (first, stop) in self.order.parts(request):
            encoded = windows.encoded(window, block)
            parts.append({
                name: rows_between(feature, first, stop) for name, feature in encoded.items()
            })
            num_rows = num_rows + stop - first
        joined = parts[0] if len(parts) == 1 else _join_by_name(parts)
        return self.columns.tensors(joined, num_rows)

    def encoded(self, window: Window) -> dict[str, Encoded]:
        """Return the features of a window, in the order of its rows. Raises DataError: a row group
        cannot be read, or a value does not fit."""
        groups = [self._encoded_group(self.groups[number]) for number in window.groups]
        encoded = _join_by_name(groups)
        rows = self.order.rows(window)
        if rows is not None:
            encoded = {name: take(feature, rows) for name, feature in encoded.items()}
        return encoded

    def _encoded_group(self, group: RowGroup) -> dict[str, Encoded]:
        with errors_at(group.place()):
            return self.columns.encode(self.reader.read(group, self.names))

    def kept_columns(self) -> pa.Table:
        """Return the columns `keep` of all rows."""
        tables = []
        schema = pa.schema([(name, self.reader.types[name]) for name in self.keep])
        for group in self.groups if self.keep else ():
            with errors_at(group.place()):
                # Texts are read as dictionaries.
                tables.append(self.reader.read(group, self.keep).cast(schema))
        return pa.concat_tables(tables).unify_dictionaries() if tables else pa.table({})


class _Windows:
    """The encoded windows of current batches, and of the next ones."""

    def __init__(self, rows: EncodedRows, ahead: Iterator[Request], num_threads: int) -> None:
        """ahead: the requests of all batches."""
        self._rows = rows
        self._ahead = ahead
        self._num_threads = num_threads
        self.pool = ThreadPoolExecutor(max(1, num_threads), "columns")
        self._futures: dict[int, Future[dict[str, Encoded]]] = {}
        self._current: dict[int, int] = {}
        """Block of requests -> the window that it has come to."""

    def encoded(self, window: Window, block: int) -> dict[str, Encoded]:
        """Return a window. block: of the requests, which comes to its windows in their order."""
        passed = self._current.get(block)
        self._current[block] = window.number
        # Before the next ones take memory. A block that ends where another one began reads again.
        if passed is not None and passed not in self._current.values():
            del self._futures[passed]
        self._begin(window)
        while len(self._futures) < 2 * self._num_threads:
            request = next(self._ahead, None)
            if request is None:
                break
            for next_window, _ in self._rows.order.parts(request):
                self._begin(next_window)
        return self._futures[window.number].result()

    def close(self) -> None:
        """Let the threads end."""
        # shutdown(cancel_futures=True) raises where the interpreter exits with an open iterator.
        for future in self._futures.values():
            future.cancel()
        self.pool.shutdown(wait=False)

    def _begin(self, window: Window) -> None:
        if window.number not in self._futures:
            self._futures[window.number] = self.pool.submit(self._rows.encoded, window)


def _join_by_name(parts: Sequence[Mapping[str, Encoded]]) -> dict[str, Encoded]:
    joined = {}
    for name in parts[0]:
        joined[name] = join([part[name] for part in parts])
    return joined


def take(encoded: Encoded, rows: np.ndarray) -> Encoded:
    """Return the given rows, in their order."""
    if encoded.offsets is None:
        return Encoded(np.take(encoded.values, rows, axis=0), None)
    starts = encoded.offsets[rows]
    lengths = encoded.lengths()[rows]
    offsets = offsets_of(lengths)
    values = np.empty(offsets[-1], dtype=encoded.values.dtype)
    # In blocks whose indices fit into a processor's cache.
    block_rows = BLOCK // WORD
    for first in range(0, len(rows), block_rows):
        stop = first + block_rows
        indices = places(starts[first:stop], lengths[first:stop])
        ends = offsets[first : stop + 1]
        # Indices are checked and buffered in no other mode.
        np.take(
            encoded.values,
            indices,
            out=values[ends[0] : ends[-1]],
            mode="clip",
        )
    return Encoded(values, offsets)


def rows_between(encoded: Encoded, first: int, stop: int) -> Encoded:
    """Return rows from `first` to before `stop`."""
    if encoded.offsets is None:
        return Encoded(encoded.values[first:stop], None)
    offsets = encoded.offsets[first : stop + 1]
    return Encoded(encoded.values[offsets[0] : offsets[-1]], offsets - offsets[0])


def join(parts: list[Encoded]) -> Encoded:
    """Return the rows of parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    values = np.concatenate([part.values for part in parts])
    if parts[0].offsets is None:
        return Encoded(values, None)
    return Encoded(values, offsets_of(np.concatenate([part.lengths() for part in parts])))
