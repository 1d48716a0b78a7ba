"""Each row of an epoch is in one batch, whatever the ranks and workers, and after any stop."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from lightning_distrec.data import ColumnData, Hash, Number
from lightning_distrec.data.row_order import RowOrder, RowSampler, Shares
from lightning_distrec.errors import ConfigError, DataError

ROWS = 1000


def places(shares: Shares, num_batches: int, first: int = 0) -> list[list[list[int]]]:
    """Return the places of each rank's batches."""
    return [
        [
            [place for span in shares.batch(rank, number) for place in range(*span)]
            for number in range(first, num_batches)
        ]
        for rank in range(shares.num_ranks)
    ]


def flat(nested: list) -> list[int]:
    return [place for batches in nested for batch in batches for place in batch]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_ranks_and_workers_share_out_all_rows_and_others_what_remains(data: st.DataObject) -> None:
    def draw(first: int, last: int) -> int:
        return data.draw(st.integers(first, last))

    num_rows = draw(1, 300)
    shares = Shares([(0, num_rows)], draw(1, min(num_rows, 7)), draw(1, 4), draw(1, 40))
    batches = places(shares, shares.num_batches)
    sizes = [len(batch) for rank_batches in batches for batch in rank_batches]
    assert min(sizes) >= 1
    assert max(sizes) <= shares.batch_size
    assert sorted(set(flat(batches))) == list(range(num_rows))
    # A rank repeats a row only where batches have one each, and it has one fewer than there are
    # batches.
    repeats = len(flat(batches)) - num_rows
    assert repeats == 0 or (repeats < shares.num_ranks and shares.batch_size == 1)
    num_done = draw(0, shares.num_batches)
    remaining = shares.remaining(num_done)
    done = set(flat(places(shares, num_done)))
    left = {place for span in remaining for place in range(*span)}
    assert done | left == set(range(num_rows))
    if left:
        others = Shares(remaining, draw(1, 5), draw(1, 3), draw(1, 40))
        again = flat(places(others, others.num_batches))
        assert set(again) == left
        assert len(again) == len(left) or others.batch_size == 1 or len(left) < others.num_ranks


def frame() -> pd.DataFrame:
    return pd.DataFrame({
        "row": np.arange(ROWS, dtype=np.float64),
        "user": [f"u{row}" for row in range(ROWS)],
        "y": 0,
    })


def data_in(folder: Path, **options: object) -> ColumnData:
    parquet.write_table(pa.Table.from_pandas(frame()), folder / "rows.parquet", row_group_size=90)
    options = {"batch_size": 32, "buffer_rows": 200, **options}
    data = ColumnData(
        str(folder),
        {"row": Number(), "user": Hash(rows=50)},
        "y",
        cache_dir=str(folder / "cache"),
        **options,
    )
    data.prepare_data()
    data.setup()
    return data


def rows_of(batches: object) -> list[int]:
    return [int(row) for batch in batches for row in batch["dense"][:, 0]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_epoch_has_each_row_once_in_an_order_of_its_own(
    tmp_path: Path, num_workers: int
) -> None:
    loader = data_in(tmp_path, num_workers=num_workers).train_dataloader()
    orders = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        orders.append(rows_of(loader))
        assert sorted(orders[-1]) == list(range(ROWS))
    assert orders[0] != orders[1]
    # Rows of a window come from several row groups, and are mixed.
    assert len({row // 90 for row in orders[0][:64]}) >= 3
    loader.sampler.set_epoch(0)
    assert rows_of(loader) == orders[0]


def test_a_loader_continues_with_other_workers_and_batch_sizes_and_twice(tmp_path: Path) -> None:
    loader = data_in(tmp_path, num_workers=2).train_dataloader()
    batches = iter(loader)
    seen = rows_of([next(batches) for _ in range(7)])
    for options, size in (({}, 5), ({"batch_size": 100, "num_workers": 0}, 3), ({}, 10_000)):
        state = loader.state_dict()
        loader = data_in(tmp_path, **options).train_dataloader()
        loader.load_state_dict(state)
        total = len(loader) - loader.state_dict()["batches"]
        drawn = [batch for _, batch in zip(range(size), loader, strict=False)]
        assert len(drawn) == min(size, total)
        seen += rows_of(drawn)
    assert sorted(seen) == list(range(ROWS))
    # A position at the end is the beginning of the next epoch.
    again = data_in(tmp_path).train_dataloader()
    again.load_state_dict(loader.state_dict())
    again.sampler.set_epoch(1)
    assert sorted(rows_of(again)) == list(range(ROWS))


@pytest.mark.parametrize("num_workers", [1, 2])
def test_batches_after_any_stop_are_those_of_an_epoch_that_did_not(
    tmp_path: Path, num_workers: int
) -> None:
    data = data_in(tmp_path, num_workers=num_workers, batch_size=64)
    expected = list(map(rows_of, zip(data.train_dataloader())))
    loader = data.train_dataloader()
    for number in range(len(expected)):
        state = loader.state_dict()
        loader = data.train_dataloader()
        loader.load_state_dict(state)
        batches = iter(loader)
        seen = [rows_of([next(batches)])]
        loader.sampler.set_epoch(1)  # of the next iterator
        assert [*seen, *map(rows_of, zip(batches))] == expected[number:]
        loader = data.train_dataloader()
        loader.load_state_dict(state)
        next(iter(loader))


def test_a_position_of_other_rows_is_not_used(tmp_path: Path) -> None:
    state = data_in(tmp_path).train_dataloader().state_dict() | {"batches": 3}
    loader = data_in(tmp_path, seed=2).train_dataloader()
    with pytest.warns(UserWarning, match="of other row groups, or of another seed"):
        loader.load_state_dict(state)
    assert len(rows_of(loader)) == ROWS


def test_shares_of_rows_validate_and_test_in_order(tmp_path: Path) -> None:
    data = data_in(tmp_path, val=0.15, test=0.1)
    assert rows_of(data.val_dataloader()) == list(range(750, 900))
    assert rows_of(data.test_dataloader()) == list(range(900, 1000))
    assert sorted(rows_of(data.train_dataloader())) == list(range(750))
    with pytest.raises(ConfigError, match=r"val=0\.5, test=0\.5: shares lie between"):
        data_in(tmp_path, val=0.5, test=0.5)
    for shares, stage in (({"val": 0.9996}, "train"), ({"test": 0.0004}, "test")):
        with pytest.raises(DataError, match=f"{stage}: there are no rows. .* 1000 training"):
            data_in(tmp_path, **shares)


def test_too_few_rows_for_the_ranks_are_an_error() -> None:
    with pytest.raises(DataError, match="3 rows are too few for 4 ranks"):
        RowSampler(RowOrder([3], shuffle=True, seed=1, buffer_rows=9), 4, 0, 1, 8)


def test_a_position_saved_before_the_first_batch_of_a_resumed_run_is_where_that_began(
    tmp_path: Path,
) -> None:
    batches = iter(first := data_in(tmp_path, batch_size=5).train_dataloader())
    seen, state = rows_of([next(batches)]), first.state_dict()
    for _ in range(2):  # as many batches are left as an epoch has
        loader = data_in(tmp_path, batch_size=100).train_dataloader()
        loader.load_state_dict(state)
        state = loader.state_dict()
    assert sorted(seen + rows_of(loader)) == list(range(ROWS))
