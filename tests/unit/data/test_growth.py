"""Columns of a checkpoint, merged with those of newer data, and tensors read along their rows."""

import pyarrow as pa
import pytest
import torch

from lightning_distrec.checkpoint.lazy_tensors import GrownTensor, MappedTensor, materialized
from lightning_distrec.chunks import Chunk
from lightning_distrec.data import Columns
from lightning_distrec.data.growth import grown
from lightning_distrec.data.raw_values import UNKNOWN

FEATURES = {
    "city": {"kind": "vocabulary", "rows": 6},
    "user": {"kind": "hash", "rows": 8},
    "pair": {"kind": "cross", "of": ["city", "user"], "rows": 5},
    "price": {"kind": "number", "standardize": True},
    "range": {"kind": "bucketize", "column": "price", "quantiles": 3},
}


def clicks(cities: str, price: float = 1.0) -> pa.Table:
    return pa.table({
        "city": list(cities),
        "user": [f"u{number}" for number in range(len(cities))],
        "price": [price * number for number in range(len(cities))],
    })


def resized(**rows: int) -> dict:
    return FEATURES | {name: FEATURES[name] | {"rows": value} for name, value in rows.items()}


def test_known_values_keep_their_rows_and_new_ones_take_free_or_retired_rows() -> None:
    table = clicks("aaaabbbccd")
    old = Columns(FEATURES).fit([table])
    for cities, rows, expected, new_rows, words in (
        ("aaaabbbccd", 6, "abcd", [], ""),
        ("eda", 6, "abcde", [5], "1 new values, 0 retired, 6 of 6 rows in use"),
        # Of b and c, which the second day has not, c's row is the last one.
        ("eeedf", 6, "abfde", [3, 5], "2 new values, 1 retired, 6 of 6 rows in use"),
        ("vwxyz", 6, "zyxwv", [1, 2, 3, 4, 5], "5 new values, 4 retired, 6 of 6 rows in use"),
        ("eeefda", 9, "abcdef", [5, 6], "2 new values, 0 retired, 7 of 9 rows in use"),
        ("aab", 9, "abcd", [], "0 new values, 0 retired, 5 of 9 rows in use"),
    ):
        fitted = Columns(resized(city=rows)).fit([clicks(cities, price=7.0)])
        growth = grown(old, fitted)
        assert "".join(growth.plain["vocabularies"]["city"]) == expected
        changed = growth.changed.get("city")
        assert (changed.message if changed else "") == words
        assert (sorted(changed.new_rows.tolist()) if changed else []) == new_rows
        merged = Columns.from_plain(growth.plain)
        # Numbers mean what they meant; so does a value that has kept its row.
        for name in ("price", "range"):
            assert torch.equal(
                torch.from_numpy(merged.encode(table)[name].values),
                torch.from_numpy(old.encode(table)[name].values),
            )
        # Growing again by the same data changes nothing, so that a restarted job goes on.
        repeated = grown(merged, fitted)
        assert (repeated.plain, repeated.changed) == (growth.plain, {})


def test_more_rows_of_a_hash_part_those_that_were_there() -> None:
    table = clicks("abcdefghij" * 20)
    old = Columns(FEATURES).fit([table])
    fitted = Columns(resized(user=22, pair=9)).fit([table])
    growth = grown(old, fitted)
    merged = Columns.from_plain(growth.plain)
    for name, rows in (("user", 22), ("pair", 9)):
        saved = torch.randn(FEATURES[name]["rows"], 3)
        change = growth.changed[name]
        new_rows = torch.from_numpy(change.new_rows)
        tensor = GrownTensor(MappedTensor(saved), rows, change.factor, new_rows)
        assert tensor.shape == (rows, 3)
        # By pieces, as ranks have them: of rows, and of columns.
        weight = torch.full((rows, 3), torch.nan)
        for first in range(0, rows, 4):
            tensor.read_into([Chunk((first, 0), weight[first : first + 4, :2])])
            tensor.read_into([Chunk((first, 2), weight[first : first + 4, 2:])])
        saved_vectors = saved[torch.from_numpy(old.encode(table)[name].values).long()]
        vectors = weight[torch.from_numpy(merged.encode(table)[name].values).long()]
        assert torch.equal(vectors, saved_vectors), name
        assert torch.equal(weight[UNKNOWN], saved[UNKNOWN])
        with pytest.raises(NotImplementedError, match="no values of new rows"):
            materialized(tensor)


def test_features_may_come_and_go() -> None:
    old = Columns(FEATURES).fit([clicks("aab")])
    features = {"town": {**FEATURES["city"], "column": "city"}} | {
        name: FEATURES[name] for name in ("range", "price", "user", "pair")
    }
    growth = grown(old, Columns(features).fit([clicks("ccd", price=5.0)]))
    assert (growth.changed, growth.added, growth.dropped) == ({}, {"town"}, {"city"})
    assert list(growth.plain["features"]) == list(features)
    assert growth.plain["vocabularies"] == {"town": ["c", "d"]}
    assert growth.plain["moments"] == old.to_plain()["moments"]
    # A new feature on a table that is known has the ranges that its rows are of.
    features = {"cost": {**FEATURES["range"], "table": "range"}}
    growth = grown(old, Columns(features).fit([clicks("ccd", price=5.0)]))
    assert growth.plain["boundaries"] == {"cost": old.to_plain()["boundaries"]["range"]}
