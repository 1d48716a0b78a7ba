"""Makes batches of places in an epoch's order, from windows of rows that are read and encoded at
once."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from torch.utils.data import Dataset, get_worker_info

from lightning_distrec.data.arrow_columns import errors_at
from lightning_distrec.data.columns import Columns
from lightning_distrec.data.raw_values import BLOCK, WORD, Encoded, offsets_of, places
from lightning_distrec.data.row_groups import Reader, RowGroup
from lightning_distrec.data.row_order import Request, RowOrder, pack


class EncodedRows(Dataset):
    """Makes batches of places in an epoch's order. It holds one window of encoded rows, the last
    that was read."""

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
        self._window: tuple[tuple[int, int], dict[str, Encoded]] | None = None

    def __getitem__(self, request: Request) -> Any:
        epoch, spans = request
        self.order.begin(epoch)
        parts = []
        num_rows = 0
        for first, stop in spans:
            while first < stop:
                window, (begin, end) = self.order.window_at(first)
                encoded = self._encoded(epoch, window)
                until = min(stop, end)
                parts.append({
                    name: rows_between(feature, first - begin, until - begin)
                    for name, feature in encoded.items()
                })
                num_rows = num_rows + until - first
                first = until
        joined = parts[0] if len(parts) == 1 else _join_by_name(parts)
        tensors = self.columns.tensors(joined, num_rows)
        return pack(tensors) if get_worker_info() else self.columns.batch(tensors)

    def _encoded(self, epoch: int, window: int) -> dict[str, Encoded]:
        if self._window is None or self._window[0] != (epoch, window):
            self._window = None  # before the next one takes memory
            numbers = self.order.groups(window)
            groups = [self._encoded_group(self.groups[number]) for number in numbers]
            encoded = _join_by_name(groups)
            rows = self.order.rows(window)
            if rows is not None:
                encoded = {name: take(feature, rows) for name, feature in encoded.items()}
            self._window = (epoch, window), encoded
        return self._window[1]

    def _encoded_group(self, group: RowGroup) -> dict[str, Encoded]:
        with errors_at(group.place()):
            return self.columns.encode(self.reader.read(group, self.names))

    def kept_columns(self) -> pa.Table:
        """Return the columns `keep` of all rows."""
        tables = []
        for group in self.groups if self.keep else ():
            with errors_at(group.place()):
                tables.append(self.reader.read(group, self.keep))
        return pa.concat_tables(tables).unify_dictionaries() if tables else pa.table({})


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
        values[ends[0] : ends[-1]] = encoded.values[indices]
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
