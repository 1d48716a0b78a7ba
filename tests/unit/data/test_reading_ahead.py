"""Threads that read ahead change neither batches nor their order, hold few windows, and end."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from lightning_distrec.data import ColumnData, Columns, Hash, Number, Vocabulary
from lightning_distrec.data.row_groups import ParquetReader, Reader, RowGroup
from lightning_distrec.errors import DataError
from tests.support.limits import LIMIT_SECONDS

ROWS = 3000
ROWS_PER_GROUP = 100
FEATURES = {
    "row": Number(),
    "user": Hash(rows=10_000),
    "history": Vocabulary(rows=3001, max_length=3),
}


def rows_of(numbers: Sequence[int]) -> dict[str, list]:
    return {
        "row": list(map(float, numbers)),
        "user": [f"u{number}" for number in numbers],
        "history": [[f"i{number}"] * (number % 5) for number in numbers],
        "clicked": [0] * len(numbers),
    }


def data_in(folder: Path, **options: object) -> ColumnData:
    file = folder / "rows.parquet"
    if not file.exists():
        parquet.write_table(pa.table(rows_of(range(ROWS))), file, row_group_size=ROWS_PER_GROUP)
    data = ColumnData(
        str(file),
        FEATURES,
        "clicked",
        batch_size=64,
        buffer_rows=2 * ROWS_PER_GROUP,
        cache_dir=str(folder / "cache"),
        **options,
    )
    data.prepare_data()
    data.setup()
    return data


class NotingReader:
    """Notes which row groups are read."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.numbers: list[int] = []

    def read(self, group: RowGroup, columns: Sequence[str]) -> pa.Table:
        self.numbers.append(group.number)
        return self.reader.read(group, columns)


def reading_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("columns")]


def assert_no_thread_reads() -> None:
    limit = time.monotonic() + LIMIT_SECONDS
    while reading_threads() and time.monotonic() < limit:
        time.sleep(0.01)
    assert not reading_threads()


ALONE = ([2181, 1621, 2163, 2138, 1678, 1641], [489, 2011, 2066, 431, 452, 449])
ORDERS = {
    0: ALONE,
    1: ALONE,
    2: ([2181, 1621, 2163, 265, 1729, 203], [489, 2011, 2066, 2715, 2774, 2795]),
}
"""Number of workers -> the first rows of the first two batches, of two epochs: as they were when
workers were processes, so that older checkpoints resume."""


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_batches_of_two_epochs_at_once_are_what_columns_make_of_their_rows(
    tmp_path: Path, num_workers: int
) -> None:
    data = data_in(tmp_path, num_workers=num_workers)
    iterators = []
    for epoch in range(2):
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        iterators.append(iter(loader))
    seen: tuple[list[int], list[int]] = ([], [])
    for batches in zip(*iterators, strict=True):
        for numbers, batch in zip(seen, batches, strict=True):
            rows = batch["dense"][:, 0].int().tolist()
            numbers += rows
            expected = data.columns(rows_of(rows))
            assert batch["ids"].to_dict().keys() == expected["ids"].to_dict().keys()
            assert batch["ids"].values().equal(expected["ids"].values())
            assert batch["ids"].lengths().equal(expected["ids"].lengths())
    for numbers, first in zip(seen, ORDERS[num_workers], strict=True):
        assert sorted(numbers) == list(range(ROWS))
        assert [*numbers[:3], *numbers[64:67]] == first
    assert_no_thread_reads()


def test_each_row_group_is_read_once_and_few_ahead_and_threads_end_with_the_iterator(
    tmp_path: Path,
) -> None:
    loader = data_in(tmp_path, num_workers=2).train_dataloader()
    loader.dataset.reader = reader = NotingReader(loader.dataset.reader)
    batches = iter(loader)
    next(batches)
    time.sleep(0.2)
    # The window of each worker, and the next one of each; a window has two row groups.
    assert 2 <= len(reader.numbers) <= 8
    batches.close()
    assert_no_thread_reads()
    reader.numbers.clear()
    assert len(list(loader)) == len(loader)
    assert sorted(set(reader.numbers)) == list(range(ROWS // ROWS_PER_GROUP))
    # But for the window on the border of two workers.
    assert len(reader.numbers) <= ROWS // ROWS_PER_GROUP + 2


class DamagedReader(ParquetReader):
    """Cannot read one row group."""

    def read(self, group: RowGroup, columns: Sequence[str]) -> pa.Table:
        if group.number == 25:
            raise OSError("the disk is gone")
        return super().read(group, columns)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_row_group_that_cannot_be_read_is_an_error_once_a_batch_needs_it(
    tmp_path: Path, num_workers: int
) -> None:
    loader = data_in(tmp_path, num_workers=num_workers, val=0.5).val_dataloader()
    loader.dataset.reader = DamagedReader(loader.dataset.reader.types)
    drawn = []
    with pytest.raises(DataError, match="row group 25, .*the disk is gone"):
        drawn.extend(loader)
    rows = [int(row) for batch in drawn for row in batch["dense"][:, 0]]
    assert rows
    assert not {*range(2500, 2600)} & {*rows}
    assert_no_thread_reads()


def test_a_large_vocabulary_has_all_of_its_values_and_no_others() -> None:
    values = [f"v{number}" for number in range(20_000)]
    rows = 15_001
    columns = Columns({"item": Vocabulary(rows=rows)})
    columns.fit([pa.table({"item": sorted(values) + sorted(values)[: rows - 1]})])
    texts = pa.table({"item": sorted(values) + ["unseen", ""]})
    dictionary = pa.table({"item": texts["item"].combine_chunks().dictionary_encode()})
    expected = [*range(1, rows), *[0] * (len(values) - rows + 1), 0, 0]
    for table in (texts, dictionary):
        assert columns(table)["ids"].values().tolist() == expected
    known = np.array(columns.encoder.rows_of_values("item", sorted(values)))
    assert known.tolist() == expected[: len(values)]
