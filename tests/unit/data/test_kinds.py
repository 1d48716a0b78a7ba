"""Vectors, weights, values by key and times in zones are what plain Python makes of them, in
training and, after a trip through JSON, in serving."""

import json
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import polars
import pyarrow as pa
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyarrow import compute, parquet

from lightning_distrec.data import ColumnData, Columns
from lightning_distrec.data.raw_values import Encoder
from lightning_distrec.data.time_zones import FIRST_DAY, LAST_DAY, offsets_in
from lightning_distrec.errors import ConfigError, DataError

NUMBERS = [pa.float16(), pa.float32(), pa.float64(), pa.int8(), pa.int64(), pa.decimal128(9, 2)]
TEXTS = [pa.string(), pa.large_string(), pa.int16(), pa.int64()]
LISTS = [pa.list_, pa.large_list]
ZONES = ["Europe/Zurich", "Australia/Lord_Howe", "America/New_York", "Asia/Kathmandu"]
TIMES = st.datetimes(datetime(1850, 1, 1), datetime(2150, 1, 1))


def same_in_serving(columns: Columns, table: pa.Table) -> dict[str, np.ndarray]:
    """Return the tensors of training, after a comparison with those of serving, to the bit."""
    data = ColumnData(table, columns.features, form=columns.form, batch_size=table.num_rows)
    data.setup()
    rows = json.loads(json.dumps(data.raw_rows(), allow_nan=False))
    served = Encoder(json.loads(json.dumps(columns.to_plain()))).arrays_of_rows(rows)
    tensors = columns.tensors(columns.encode(table), table.num_rows)
    trained = {name: tensor.numpy() for name, tensor in tensors.items()}
    assert trained.keys() == served.keys()
    for name, array in trained.items():
        assert array.dtype == served[name].dtype
        assert np.array_equal(array, served[name]), (name, array, served[name], table.schema)
    return trained


def numbers_as(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Return numbers that a type of Arrow has exactly."""
    if pa.types.is_integer(kind):
        return st.integers(-100, 100)
    quarters = st.integers(-400, 400).map(lambda number: number / 4)
    if pa.types.is_decimal(kind):
        return quarters.map(lambda number: Decimal(str(number)))
    # What is no fraction of a power of two, and is rounded.
    return st.one_of(quarters, st.floats(-1e4, 1e4, width=16 if kind == pa.float16() else 32))


@settings(max_examples=100, deadline=None, phases=[Phase.generate])
@given(st.data())
def test_drawn_columns_of_all_types_are_in_serving_what_they_are_in_training(
    data: st.DataObject,
) -> None:
    draw = data.draw
    kind, list_of = draw(st.sampled_from(NUMBERS)), draw(st.sampled_from(LISTS))
    text_kind, key_kind = draw(st.sampled_from(TEXTS)), draw(st.sampled_from(TEXTS[::2]))
    form = draw(st.sampled_from(["jagged", "padded"]))
    zone, unit = draw(st.sampled_from(ZONES)), draw(st.sampled_from(["hours", "days"]))
    number = numbers_as(kind)
    size, num_rows = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    is_fixed = draw(st.booleans())
    vectors = st.one_of(st.none(), st.lists(number, min_size=size, max_size=size))
    ids = st.integers(0, 9).map(lambda id: id if pa.types.is_integer(text_kind) else f"i{id}")
    entries = st.one_of(st.none(), st.dictionaries(st.sampled_from(["1", "2", "3"]), number))
    rows = []
    for _ in range(num_rows):
        values = draw(st.one_of(st.none(), st.lists(st.one_of(st.none(), ids), max_size=4)))
        count = len(values or [])
        rows.append({
            "vector": draw(vectors),
            "values": values,
            "weights": draw(st.lists(number, min_size=count, max_size=count)) if values else values,
            "map": draw(entries),
            "key": draw(st.sampled_from(["1", "2", None])),
            "at": draw(st.one_of(st.none(), TIMES)),
        })
    lists = {name: [row[name] for row in rows] for name in rows[0]}
    pairs = [entries and list(entries.items()) for entries in lists["map"]]
    key_type = draw(st.sampled_from([pa.string(), pa.int32()]))
    if key_type == pa.int32():
        pairs = [entry and [(int(key), value) for key, value in entry] for entry in pairs]
    maps = pa.array(pairs, pa.map_(key_type, kind))
    keys = pa.array(lists["key"]).cast(key_kind)
    if draw(st.booleans()):
        fields = pa.struct([(key, kind) for key in "321"])
        maps = pa.array(lists["map"], fields)
        keys = pa.array(lists["key"], pa.string()).dictionary_encode()
    moments = pa.array(lists["at"], pa.timestamp("us", draw(st.sampled_from([None, "Asia/Tokyo"]))))
    units = [moments, moments.cast(pa.timestamp("ms", moments.type.tz), safe=False)]
    nanoseconds = compute.add(compute.multiply(moments.cast(pa.int64()), 1000), 777)
    units.append(nanoseconds.cast(pa.timestamp("ns", moments.type.tz)))
    moments = draw(st.sampled_from(units))
    vector_type = pa.list_(kind, size) if is_fixed else list_of(kind)
    table = pa.table({
        "vector": pa.array(lists["vector"], vector_type),
        "values": pa.array(lists["values"], list_of(text_kind)),
        "weights": pa.array(lists["weights"], list_of(kind)),
        "map": maps,
        "key": keys,
        "at": moments,
    })
    features: dict[str, Any] = {
        "vector": {"kind": "vector", "size": size, "missing": -7},
        "values": {"kind": "hash", "rows": 99, "max_length": 2, "weights": "weights"},
        "by_key": {"kind": "number", "column": "map", "key": "key", "missing": 0.5},
        "age": {"kind": "age", "column": "at", "until": "2024-03-01", "unit": unit, "log": True},
    }
    for part in ("hour", "weekday", "day", "month"):
        features[part] = {"kind": "time", "column": "at", "part": part, "zone": zone}
    if form == "jagged":
        features["values"]["group"] = "weighted"
    columns = Columns(features, form=form).fit([table])
    trained = same_in_serving(columns, table.slice(draw(st.integers(0, num_rows - 1))))
    trained = same_in_serving(columns, table)

    def rounded(number: Any) -> np.float32:
        return np.float32(pa.scalar(number, kind).as_py())

    expected = np.full((num_rows, size), -7, np.float32)
    looked_up = []
    parts = []
    weights = []
    for number_of_row, row in enumerate(rows):
        if row["vector"]:
            expected[number_of_row] = [rounded(number) for number in row["vector"]]
        value = (row["map"] or {}).get(row["key"])
        looked_up.append(np.float32(0.5) if value is None else rounded(value))
        weights += [rounded(weight) for weight in (row["weights"] or [])[-2:]]
        local = None
        if row["at"]:
            exact = table["at"][number_of_row].as_py().replace(tzinfo=timezone.utc)
            if moments.type.tz:
                exact = table["at"][number_of_row].as_py()
            local = exact.astimezone(ZoneInfo(zone))
        parts.append(
            (local.hour + 1, local.weekday() + 1, local.day, local.month) if local else (0,) * 4
        )
    assert np.array_equal(trained["dense"][:, :size], expected)
    assert trained["dense"][:, size].tolist() == looked_up
    if form == "jagged":
        assert trained["weighted.weights"].tolist() == weights
        assert trained["ids.values"].reshape(4, -1).T.tolist() == list(map(list, parts))
    else:
        assert trained["values.weights"].shape == trained["values"].shape == (num_rows, 2)
        assert sorted(
            trained["values.weights"].ravel()[trained["values.weights"].ravel() != 0]
        ) == (sorted(weight for weight in weights if weight))
        assert np.stack([trained[p] for p in list(features)[4:]], 1).tolist() == [
            list(row) for row in parts
        ]


def vector(**settings: Any) -> dict[str, Any]:
    return {"kind": "vector", "size": 2, **settings}


WEIGHTED = {"kind": "hash", "rows": 9, "max_length": 2, "weights": "w"}
BY_KEY = {"kind": "number", "key": "k"}


@pytest.mark.parametrize(
    ("feature", "columns", "message"),
    [
        (vector(), {"a": [[1, 2], [1]]}, "'a': row 1 has more or fewer numbers than size=2"),
        (vector(required=True), {"a": [[1, 2], []]}, "'a': row 1 has more or fewer numbers than size"),
        (vector(), {"a": [None, [1, None]]}, "'a': a value is missing, the first in row 1, in a v"),
        (vector(), {"a": [[1, 2], [3, 1e39]]}, r"'a': 1e\+39 in row 1 is no finite number in 32"),
        (vector(separator="|"), {"a": ["1|2", "", "3"]}, "'a': row 2 has more or fewer numbers tha"),
        (WEIGHTED, {"a": [["x"], ["y", "z"]], "w": [[1.0], [2.0]]}, "row 1 has not as many values as"),
        (WEIGHTED, {"a": [["x"], ["y"]], "w": [[1.0], None]}, "row 1 has not as many values as w"),
        (WEIGHTED, {"a": [["x"], ["y"]], "w": [[1.0], [None]]}, "'w': .* missing, the first in row 1"),
        (BY_KEY, {"a": [{"x": 1}, {"x": 1e39}], "k": ["x", "x"]}, r"'a\[k\]': 1e\+39 in row 1 is no f"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_the_same_error_in_training_and_in_serving(
    feature: dict[str, Any], columns: dict[str, list[Any]], message: str
) -> None:
    mapping = Columns({"a": feature}).fit([pa.table(columns)])
    with pytest.raises(DataError, match=message):
        mapping(columns)
    rows = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    with pytest.raises(ValueError, match=message):
        mapping.encoder.arrays_of_rows(rows)


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({"a": vector(size=0)}, "'a': vector: size=0: set 1 number or more"),
        ({"a": vector(missing="x")}, r"'a' \(vector\): missing='x' must be of the type float \| int."),
        ({"a": {"kind": "hash", "rows": 1e6}}, "rows=1000000.0 must be of the type int."),
        ({"a": {"kind": "number", "log": "no"}}, "log='no' must be of the type bool."),
        ({"a": {"kind": "hash", "rows": 9, "max_length": 1.5}}, r"must be of the type int \| None."),
        ({"a": vector(key="k")}, "neither max_length nor key"),
        ({"a": {**WEIGHTED, "max_length": None}}, "weights='w': they are those of a sequence's val"),
        ({"a": {**BY_KEY, "max_length": 2}}, "key='k': a map has one value by key"),
        ({"a": {"kind": "cross", "of": ["x", "y"], "rows": 9, "key": "k"}}, "max_length nor key"),
        ({"a": {"kind": "age", "until": "2024-01-01", "unit": "years"}}, "unit='years': use one of"),
        ({"a": {"kind": "time", "part": "day", "zone": "Europe/Bern"}}, "zone='Europe/Bern' is no t"),
        ({"a": {"kind": "time", "part": "day", "zone": "../x"}}, "pip install tzdata"),
        ({"a": WEIGHTED, "b": {"kind": "hash", "rows": 9}}, "some of 'ids' have weights, and a Key"),
        ({"a": WEIGHTED, "w": {"kind": "number"}}, "'w' and 'a.weights' read the column 'w' in two"),
        ({"a": WEIGHTED, "ids.weights": {"kind": "number"}}, "names that nothing else in the batch"),
        ({"a": WEIGHTED, "a.weights": {"kind": "hash", "rows": 9, "group": "g"}}, "names that noth"),
        ({"a": BY_KEY, "b": {"kind": "number", "column": "a[k]"}}, r"'a\[k\]' in two ways"),
        (
            {part: {"kind": "time", "part": "day", "table": "t", "zone": zone}
             for part, zone in (("a", "Asia/Tokyo"), ("b", "UTC"))},
            "share the table 't'",
        ),
    ],
)  # fmt: skip
def test_features_that_cannot_be_are_refused(features: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Columns(features)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": [{"x": 1}]}, "there is no column 'k'"),
        (
            {"a": [1], "k": ["x"]},
            r"column 'a\[k\]': key needs a column of maps, and the type is int",
        ),
        (
            {"a": [{"x": 1}], "k": [1.5]},
            r"'a\[k\]': keys are texts, integers or booleans, .* double",
        ),
        ({"a": [{"x": "1"}], "k": ["x"]}, r"'a\[k\]' has the type string: number needs numbers"),
        (
            {"a": [{"x": "1", "y": 2}], "k": ["x"]},
            r"'a\[k\]': Unable to merge: Field value has inco",
        ),
    ],
)
def test_maps_and_keys_of_other_types_are_refused(
    columns: dict[str, list[Any]], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        Columns({"a": BY_KEY}).fit([pa.table(columns)])


def test_files_with_other_fields_than_the_first_one_are_refused(tmp_path: Path) -> None:
    files = []
    for number, maps in enumerate(({"x": 1.0, "z": 2.0}, {"z": 3.0})):
        files.append(str(tmp_path / f"{number}.parquet"))
        parquet.write_table(pa.table({"a": [maps], "k": ["z"]}), files[-1])
    for paths in (files, files[::-1]):
        data = ColumnData(paths, {"a": BY_KEY}, cache_dir=str(tmp_path / "cache"))
        data.prepare_data()
        if paths == files:
            data.setup()
            (batch,) = data.predict_dataloader()
            assert batch["dense"].ravel().tolist() == [2, 3]
        else:
            with pytest.raises(DataError, match="0.parquet: column 'a' has the fields x, which th"):
                data.setup()


@pytest.mark.parametrize("dates", [[20240301, None], ["20240301", "20231231"]])
def test_dates_that_are_numbers_are_not_read_as_seconds(dates: list[Any]) -> None:
    columns = Columns({"a": {"kind": "time", "part": "month"}}).fit([pa.table({"a": dates})])
    with pytest.raises(DataError, match="20240301 is no time: write dates as 2024-03-01, or sec"):
        columns({"a": dates})
    assert columns({"a": [20240399, 20240301]})["ids"].values().tolist() == [8, 8]


def test_dates_have_no_zone() -> None:
    feature = {"kind": "time", "part": "hour", "zone": "Asia/Tokyo"}
    with pytest.raises(DataError, match="'a' has the type date32.*: dates are alike in all zones"):
        Columns({"a": feature}).fit([pa.table({"a": [date(2024, 3, 1)]})])


def test_of_equal_keys_the_last_counts_and_statistics_are_those_of_values_by_key() -> None:
    maps = pa.array(
        [[("x", 1.0), ("y", 9.0), ("x", 3.0)], [("z", 7.0)], [("x", 5.0)], None],
        pa.map_(pa.string(), pa.float64()),
    )
    table = pa.concat_tables([pa.table({"m": maps.slice(1, 2), "k": ["x", "x"]}),
                              pa.table({"m": maps.slice(3), "k": ["x"]}),
                              pa.table({"m": maps.slice(0, 1), "k": ["x"]})])  # fmt: skip
    features = {
        "number": {"kind": "number", "column": "m", "key": "k", "standardize": True},
        "range": {"kind": "bucketize", "column": "m", "key": "k", "quantiles": 2},
    }
    columns = Columns(features).fit([table])
    assert columns.columns == ["m", "k"]
    assert columns.to_plain()["moments"]["number"] == [4, 1]
    assert same_in_serving(columns, table)["dense"].ravel().tolist() == [0, 1, 0, -1]
    flags = pa.array([[(True, 3.0)], [(False, 5.0)]], pa.map_(pa.bool_(), pa.float64()))
    flags = pa.table({"m": flags, "k": [True, True]})
    assert same_in_serving(columns, flags)["dense"].ravel().tolist() == [-1, 0]
    texts = polars.DataFrame({"m": [{"x": "a"}, {"x": None}], "k": ["x", "x"]})
    data = ColumnData(texts, {"a": {"kind": "vocabulary", "rows": 9, "column": "m", "key": "k"}})
    data.setup()
    (batch,) = data.predict_dataloader()
    assert batch["ids"].values().tolist() == [1, 0]
    # Lists of dicts become structs, whose fields have types of their own, or none.
    structs = {
        "m": [{"x": 3, "y": 9.5, "z": None}, {"y": 5.5}, {}, None],
        "k": ["x", "y", "z", "x"],
    }
    assert columns(structs)["dense"].ravel().tolist() == [-1, 1.5, 0, 0]
    # Keys of JSON are texts; those of Python may be integers.
    arrays = columns.encoder.arrays_of_rows([{"m": {7: 5.0}, "k": 7}, {"m": {}, "k": 1}, {}])
    assert arrays["dense"].ravel().tolist() == [1, 0, 0]
    assert columns.select(["range"])(table)["ids"].values().tolist() == [0, 2, 0, 1]


@pytest.mark.parametrize("zone", [*ZONES, "UTC", "Africa/Freetown", "Africa/Casablanca"])
def test_a_zones_offsets_are_those_of_python_at_each_change(zone: str) -> None:
    starts, offsets = offsets_in(zone)
    assert sorted(set(starts)) == starts
    draw = np.random.default_rng(0)
    times = draw.integers(FIRST_DAY * 86_400, LAST_DAY * 86_400, 5_000).tolist()
    times += [start + shift for start in starts[1:] for shift in (-1, 0)]
    places = np.searchsorted(starts, times, side="right") - 1
    for time, place in zip(times, places, strict=True):
        exact = datetime.fromtimestamp(time, ZoneInfo(zone)).utcoffset()
        assert exact == timedelta(seconds=offsets[place])


def test_weights_stay_with_their_values_when_rows_are_shuffled_by_workers(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    values = [draw.integers(0, 500, size).tolist() for size in draw.integers(0, 6, 200)]
    rows = {
        "values": values,
        "weights": [[value / 4 for value in row] for row in values],
        "vector": [[float(number), float(len(row))] for number, row in enumerate(values)],
    }
    parquet.write_table(pa.table(rows), tmp_path / "rows.parquet", row_group_size=30)
    features = {
        "values": {"kind": "vocabulary", "rows": 501, "max_length": 4, "weights": "weights"},
        "vector": {"kind": "vector", "size": 2},
    }
    for num_workers in (0, 1):
        data = ColumnData(
            str(tmp_path / "rows.parquet"),
            features,
            batch_size=32,
            buffer_rows=70,
            num_workers=num_workers,
            cache_dir=str(tmp_path / "cache"),
        )
        data.prepare_data()
        data.setup()
        vocabulary = [0, *map(int, data.columns.to_plain()["vocabularies"]["values"])]
        order = []
        for batch in data.train_dataloader():
            sequences = zip(batch["dense"].tolist(), batch["ids"]["values"].to_dense(), strict=True)
            weights = batch["ids"]["values"].to_dense_weights()
            for (row, ids), row_weights in zip(sequences, weights, strict=True):
                order.append(int(row[0]))
                expected = values[order[-1]][-4:]
                assert row[1] == len(values[order[-1]])
                assert [vocabulary[id] for id in ids] == expected
                assert row_weights.tolist() == [value / 4 for value in expected]
        assert sorted(order) == list(range(200))
        assert order != sorted(order)


def test_texts_of_vectors_and_weights_are_what_their_lists_are(tmp_path: Path) -> None:
    lists = {
        "vector": [[0.1, 2.0], None, [3.0, -4.5]],
        "values": [["a", "b", "c"], [], ["d"]],
        "w": [[0.25, 1.0, 1e-3], [], [2.0]],
    }
    texts = {name: ["|".join(map(str, row or [])) for row in rows] for name, rows in lists.items()}
    lines = [",".join(texts), *map(",".join, zip(*texts.values(), strict=True))]
    (tmp_path / "rows.csv").write_text("\n".join(lines) + "\n")
    arrays = []
    for separator, source in (("|", str(tmp_path / "rows.csv")), (None, pa.table(lists))):
        features = {
            "vector": vector(separator=separator),
            "values": {**WEIGHTED, "separator": separator},
        }
        data = ColumnData(source, features, cache_dir=str(tmp_path / "cache"))
        data.prepare_data()
        data.setup()
        (batch,) = data.predict_dataloader()
        served = data.columns.encoder.arrays_of_rows(json.loads(json.dumps(data.raw_rows())))
        assert np.array_equal(served["dense"], batch["dense"])
        assert np.array_equal(served["ids.weights"], batch["ids"].weights())
        arrays.append(served)
    assert all(np.array_equal(arrays[0][name], array) for name, array in arrays[1].items())
