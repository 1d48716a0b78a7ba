"""Raw values become the same ids and numbers by Arrow, by lists, and after a trip through JSON."""

import json
from datetime import datetime, timezone

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_distrec.data import Age, Bucketize, Columns, Cross, Hash, Number, Time, Vocabulary
from lightning_distrec.data.arrow_columns import texts_of
from lightning_distrec.data.features import feature_of
from lightning_distrec.data.raw_values import Encoder, hash_texts, mix, pack, rows_of
from lightning_distrec.errors import ConfigError, DataError

FEATURES = {
    "user": {"kind": "hash", "rows": 100},
    "friends": {"kind": "hash", "rows": 100, "table": "user", "max_length": 2},
    "city": {"kind": "vocabulary", "rows": 3},
    "tags": {"kind": "vocabulary", "rows": 10, "max_length": 3, "separator": " ", "min_count": 2},
    "age": {"kind": "bucketize", "boundaries": [18, 30]},
    "price": {"kind": "number", "log": True, "standardize": True, "missing": -1.0},
    "price_range": {"kind": "bucketize", "column": "price", "quantiles": 4},
    "visits": {"kind": "number", "max_length": 2},
    "user_in_city": {"kind": "cross", "of": ["user", "city"], "rows": 50},
}
ROWS = {
    "user": ["ann", "bob", None, "", "Zürich, a text of more than eight bytes"],
    "friends": [["bob", "ann", "eve"], [], None, ["ann", None], ["x"]],
    "city": ["Bern", "Bern", "Rom", "Rom", "Oslo"],
    "tags": ["new hot", "", None, "hot new old sold", "new"],
    "age": [17, 18, None, 64, 30],
    "price": [12.5, 0.25, None, 99.0, 3.0],
    "visits": [[1.0, 2.0, 3.0], [], None, [4.0], [5.0, 6.0]],
    "clicked": [1, 0, 0, 1, 0],
}


@pytest.fixture(scope="module")
def columns() -> Columns:
    return Columns(FEATURES, "clicked").fit([pa.table(ROWS)])


def test_hashes_are_those_of_every_version_and_machine() -> None:
    # Fixed values: served folders and checkpoints depend on them. SplitMix64's first output of seed
    # 0 is public.
    assert int(mix(np.array([0x9E3779B97F4A7C15], dtype=np.uint64))[0]) == 0xE220A8397B1DCDAF
    texts = pack(["", "a", "42", "u123", "Zürich", "x" * 9, True, None])
    assert hash_texts(texts, 0).tolist() == [
        0,
        12863134145693902729,
        9557078766222286966,
        17521676999535762280,
        602381810611293888,
        15202679785132981938,
        10379863020877451534,
        0,
    ]
    assert hash_texts(texts, 7).tolist() == [
        9507321334815476053,
        1690956918524374692,
        6508283531349256670,
        713098079299573124,
        15650065911258565284,
        2103285074218470806,
        8404281191788173918,
        9507321334815476053,
    ]
    assert rows_of(hash_texts(texts, 7), 1000).tolist() == [515, 92, 353, 39, 848, 114, 456, 515]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.none(), st.text(max_size=30)), max_size=40), st.integers(0, 3))
def test_texts_are_hashed_alike_by_arrow_by_lists_in_slices_and_in_dictionaries(
    texts: list, start: int
) -> None:
    expected = hash_texts(pack(texts[start:]), 5)
    array = pa.array(texts, pa.string())
    for values in (array.slice(start), array.cast(pa.large_string()).slice(start)):
        assert np.array_equal(hash_texts(texts_of(values), 5), expected)
    columns = Columns({"a": Hash(rows=1000, seed=5)}).fit([pa.table({"a": array})])
    plain = columns(pa.table({"a": array}))["ids"].values()
    assert torch.equal(columns(pa.table({"a": array.dictionary_encode()}))["ids"].values(), plain)
    assert [row == 0 for row in plain.tolist()] == [text is None for text in texts]


def test_a_missing_value_of_a_dictionary_is_in_no_vocabulary() -> None:
    values = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1, None]), pa.array(["x", None]))
    columns = Columns({"a": Vocabulary(rows=5)}).fit([pa.table({"a": values})])
    assert columns.to_plain()["vocabularies"]["a"] == ["x"]
    assert columns(pa.table({"a": values}))["ids"].values().tolist() == [0, 1, 0, 0]


def test_integers_and_booleans_are_hashed_as_their_texts_and_other_numbers_refused() -> None:
    columns = Columns({"a": Hash(rows=2**32)}).fit([pa.table({"a": ["text"]})])
    by_type = [
        columns({"a": values})["ids"].values().tolist() for values in ([42, -1], ["42", "-1"])
    ]
    assert by_type[0] == by_type[1]
    assert (
        columns({"a": [True]})["ids"].values().tolist()
        == columns({"a": ["true"]})["ids"].values().tolist()
    )
    with pytest.raises(
        DataError, match=r"column 'a' has the type double: hash needs texts, integers or booleans"
    ):
        Columns({"a": Hash(rows=9)}).fit([pa.table({"a": [1.5]})])


def test_hashes_fill_rows_evenly_and_collide_as_chance_does() -> None:
    rows = rows_of(hash_texts(pack([f"user {number}" for number in range(100_000)])), 1001)
    counts = np.bincount(rows, minlength=1001)
    assert counts[0] == 0
    # 1000 cells of 100 on average: chi-squared has the mean 999 and the deviation 45.
    assert abs(((counts[1:] - 100) ** 2 / 100).sum() - 999) < 5 * 45
    assert len(np.unique(hash_texts(pack([str(number) for number in range(100_000)])))) == 100_000


def test_each_kind_maps_as_its_docstring_promises(columns: Columns) -> None:
    ids = {name: jagged.to_dense() for name, jagged in columns(ROWS)["ids"].to_dict().items()}
    ids = {name: [row.tolist() for row in rows] for name, rows in ids.items()}
    # Of equal counts the first letter comes first; Oslo has no row left, a missing value has none.
    assert ids["city"] == [[1], [1], [2], [2], [0]]
    # "new" occurs three times, "hot" twice, the others once; the last three of four are used.
    assert ids["tags"] == [[1, 2], [], [], [1, 0, 0], [1]]
    assert ids["age"] == [[1], [2], [0], [3], [3]]
    assert ids["price_range"] == [[3], [1], [0], [4], [2]]
    assert ids["user"][2] == ids["user_in_city"][2] == [0]
    assert all(0 < row < 100 for number in (0, 1, 3, 4) for row in ids["user"][number])
    # One table, one mapping: the last two friends, and a missing one.
    (ann,), eve = ids["user"][0], ids["friends"][0][1]
    assert ids["friends"][:4] == [[ann, eve], [], [], [ann, 0]]


def test_numbers_are_standardized_after_their_logarithm_in_float32(columns: Columns) -> None:
    prices = np.log1p(np.array([12.5, 0.25, 99.0, 3.0]))
    expected = np.insert((prices - prices.mean()) / prices.std(), 2, -1.0).astype(np.float32)
    batch = columns(ROWS)
    assert np.allclose(batch["dense"][:, 0].numpy(), expected, atol=1e-6)
    assert batch["visits"].tolist() == [[2, 3], [0, 0], [0, 0], [4, 0], [5, 6]]
    assert batch["label"].tolist() == [1, 0, 0, 1, 0]


def test_rows_of_json_have_the_batchs_tensors_bit_for_bit(columns: Columns) -> None:
    rows = [
        {name: values[number] for name, values in ROWS.items() if name != "clicked"}
        for number in range(5)
    ]
    encoder = Encoder(json.loads(json.dumps(columns.to_plain())))
    arrays, batch = encoder.arrays_of_rows(json.loads(json.dumps(rows))), columns(ROWS)
    assert np.array_equal(arrays["ids.values"], batch["ids"].values())
    assert np.array_equal(arrays["ids.lengths"], batch["ids"].lengths())
    assert np.array_equal(arrays["dense"], batch["dense"])
    assert np.array_equal(arrays["visits"], batch["visits"])
    # What a row lacks is missing in it; a number of 32 bits is rounded as its column was.
    assert encoder.arrays_of_rows([{}])["dense"].tolist() == [[-1.0]]
    rounded = Columns({"p": Number()}).fit([pa.table({"p": pa.array([0.1], pa.float32())})])
    assert rounded.encoder.arrays_of_rows([{"p": 0.1}])["dense"][0, 0] == np.float32(0.1)
    for row, message in (
        ({"pricee": 1}, "there is no column 'pricee'"),
        ({"price": "12"}, "column 'price': '12' is no number"),
        ({"user": 1.5}, "column 'user': 1.5 is neither a text nor an integer"),
        ({"friends": "ann"}, "column 'friends': 'ann' is no list"),
    ):
        with pytest.raises(ValueError, match=message):
            encoder.arrays_of_rows([row])


def test_some_of_the_features_map_alone_as_with_the_others(columns: Columns) -> None:
    names = ["tags", "price", "price_range", "user_in_city"]
    some = columns.select(names)
    batch = some({column: ROWS[column] for column in ("tags", "price", "user", "city")})
    all_ids, ids = columns(ROWS)["ids"].to_dict(), batch["ids"].to_dict()
    assert list(ids) == ["tags", "price_range", "user_in_city"]
    assert all(torch.equal(bag.values(), all_ids[name].values()) for name, bag in ids.items())
    assert list(some.to_plain()["vocabularies"]) == ["tags"]
    again = Columns.from_plain(json.loads(json.dumps(some.to_plain())))
    assert (again.to_plain(), again.tables) == (some.to_plain(), some.tables)
    assert again(ROWS).keys() == {"ids", "dense"}


def test_padded_batches_have_the_ids_of_jagged_ones(columns: Columns) -> None:
    padded = Columns(FEATURES, "clicked", form="padded").fit([pa.table(ROWS)])(ROWS)
    jagged = columns(ROWS)["ids"].to_dict()
    for name in columns.features:
        if name in jagged and name not in ("friends", "tags"):
            assert padded[name].tolist() == jagged[name].values().tolist()
    assert padded["friends"].shape == (5, 2)
    assert padded["friends"][1:3].tolist() == [[0, 0], [0, 0]]
    assert padded["tags"][0, :2].tolist() == jagged["tags"].values()[:2].tolist()


def test_a_table_may_have_the_name_of_a_number() -> None:
    features = {
        "a": Number(log=True, standardize=True),
        "b": Bucketize(column="a", quantiles=2, table="a"),
    }
    plain = Columns(features).fit([pa.table({"a": [0.0, 10.0, 1000.0]})]).to_plain()
    logarithms = np.log1p([0, 10, 1000])
    assert plain["moments"]["a"] == pytest.approx([logarithms.mean(), logarithms.std()])
    assert plain["boundaries"]["b"] == [10]


def test_fits_over_many_tables_are_those_of_one() -> None:
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({
        "x": draw.lognormal(size=30_000),
        "w": draw.zipf(1.5, 30_000).astype(str),
    })
    frame.loc[::7, "x"] = None
    features = {
        "x": Number(standardize=True),
        "bucket": Bucketize(column="x", quantiles=10),
        "w": Vocabulary(rows=20),
    }
    table = pa.Table.from_pandas(frame)
    one = Columns(features).fit([table]).to_plain()
    many = (
        Columns(features).fit(table.slice(start, 300) for start in range(0, 30_000, 300)).to_plain()
    )
    assert many["vocabularies"] == one["vocabularies"]
    assert many["boundaries"] == one["boundaries"]
    assert many["moments"]["x"] == pytest.approx([frame["x"].mean(), frame["x"].std(ddof=0)])
    counts = frame["w"].value_counts()
    assert {counts[word] for word in one["vocabularies"]["w"]} == set(counts.head(19))
    # Equal numbers have no deviation, not one of rounding.
    equal = pa.table({"x": [0.1] * 1001, "w": ["a"] * 1001})
    moments = Columns(features).fit([equal, equal.slice(0, 7)]).to_plain()["moments"]
    assert moments["x"] == [0.1, 1.0]


@pytest.mark.parametrize(
    ("feature", "message"),
    [
        ({"kind": "hsh", "rows": 9}, r"'a' has kind='hsh': use one of hash, .*; did you mean 'hash'"),
        ({"kind": "hash", "row": 9}, r"'a' \(hash\) has no 'row'; did you mean 'rows'"),
        ({"kind": "hash"}, r"'a' \(hash\) needs 'rows'"),
        ({"kind": "hash", "rows": 1}, "'a': rows=1: a table needs 2 to"),
        ({"kind": "bucketize"}, "boundaries=.*, quantiles=None: set one"),
        ({"kind": "bucketize", "boundaries": [2, 1]}, "boundaries ascend"),
        ({"kind": "bucketize", "quantiles": 1}, "at least 2"),
        ({"kind": "number", "max_length": 0}, "max_length=0"),
        ({"kind": "number", "separator": ","}, "separator=','"),
        ({"kind": "cross", "of": ["a"], "rows": 9}, "name two or more"),
        ("hash", "write a dict such as"),
        ({"kind": "time", "part": "year"}, "'a': time: part='year': use one of hour, weekday, day"),
        ({"kind": "age", "until": "now"}, "'a': age: until='now' is no time: Invalid isoformat"),
    ],
)  # fmt: skip
def test_an_impossible_feature_is_refused_by_name(feature: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        feature_of("a", feature)


def test_features_that_cannot_be_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="features a, b share the table 't'"):
        Columns({"a": Hash(rows=9, table="t"), "b": Hash(rows=10, table="t")})
    with pytest.raises(ConfigError, match="'a' and 'b' read the column 'a' in two ways"):
        Columns({"a": Hash(rows=9), "b": Number(column="a")})
    with pytest.raises(ConfigError, match="ids, dense and label are those of the batch"):
        Columns({"dense": Number()})
    with pytest.raises(ConfigError, match="form='flat'"):
        Columns({"a": Number()}, form="flat")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="not fitted"):
        Columns({"a": Number()}).to_plain()
    assert Columns({"a": Cross(of=("x", "y"), rows=7), "n": Number()}).tables["a"].rows == 7
    table = pa.table([pa.array([1.0]), pa.array([2.0])], names=["a", "a"])
    with pytest.raises(DataError, match="several columns have the name 'a'. Rename all but one"):
        Columns({"a": Number()}).fit([table])


LONG = "x" * 40_000


@pytest.mark.parametrize(
    ("feature", "values", "message"),
    [
        (Number(), None, "there is no column 'a', but b"),
        (Number(), ["x"], "column 'a' has the type string: number needs numbers"),
        (Number(), [[1]], r"type list<.*: sequences need max_length"),
        (Number(max_length=2), [1], "max_length is for lists"),
        (Hash(rows=9, max_length=2, separator=" "), [1], "max_length is for lists"),
        (Hash(rows=9, required=True), ["x", None], "'a' has required=True"),
        (Number(required=True), [1.0, None], "'a': a value is missing, the first in row 1"),
        (Vocabulary(rows=9, max_length=2), [[["x"]]], "lists of lists; write one list for each row"),
        (Number(standardize=True), [2**53 + 1], r"'a': .*; use hash .* for ids, or write numbers"),
        (Number(max_length=2), [[1.0], [float("inf")]], "'a': inf in row 1 is no finite number in"),
        (Number(standardize=True), [1.0, 1e300], r"'a': 1e\+300 in row 1 is no finite number in 32"),
        (Bucketize(quantiles=2), [1.0, float("-inf")], "'a': -inf in row 1 is no finite number"),
        (Hash(rows=9), [LONG], "'a': a text has 40000 bytes, and the most is 32768"),
        (Vocabulary(rows=9), [LONG], "a text has 40000 bytes"),
    ],
)  # fmt: skip
def test_data_that_does_not_fit_is_refused_by_column(
    feature: object, values: list | None, message: str
) -> None:
    table = pa.table({"b": [1]} if values is None else {"a": values})
    with pytest.raises(DataError, match=message):
        Columns({"a": feature}).fit([table])(table)


def test_a_missing_label_is_an_error_and_labels_may_be_several() -> None:
    columns = Columns({"a": Number()}, ["x", "y"]).fit([
        pa.table({"a": [1.0, 2.0], "x": [0, 1], "y": [1, 1]})
    ])
    assert columns({"a": [1.0], "x": [0], "y": [1]})["label"].tolist() == [[0, 1]]
    assert "label" not in columns({"a": [1.0]})
    for label in (None, float("inf")):
        with pytest.raises(
            DataError, match="column 'y': a label is missing, or not finite in 32 bits, .* in row 0"
        ):
            columns({"a": [1.0], "x": [0], "y": [label]})


@pytest.mark.parametrize(
    ("kind", "form"), [(pa.float16(), "jagged"), (pa.float32(), "padded"), (pa.float64(), "jagged")]
)
def test_numbers_of_each_type_are_in_serving_what_they_are_in_training(
    kind: pa.DataType, form: str
) -> None:
    values = [1 / 3, 0.1, None, -1e-8, 60_001.0]
    features = {
        "number": Number(column="x", log=True, standardize=True),
        "bucket": Bucketize(column="x", boundaries=(0.0, 0.1, 1 / 3)),
    }
    table = pa.table({"x": pa.array(values).cast(kind, safe=False)})
    columns = Columns(features, form=form).fit([table])  # type: ignore[arg-type]
    encoder = Encoder(json.loads(json.dumps(columns.to_plain())))
    served = encoder.arrays_of_rows([{"x": value} for value in values])
    trained = columns.tensors(columns.encode(table), 5)
    # A file of another type, such as that of validation, has the numbers that the training data
    # would have.
    other = columns.tensors(columns.encode(pa.table({"x": values})), 5)
    for name, tensor in trained.items():
        assert np.array_equal(tensor.numpy(), served[name]), name
        assert np.array_equal(other[name].numpy(), served[name]), name


def test_texts_of_numbers_are_in_serving_what_they_are_in_training() -> None:
    features = {
        "number": Number(column="x", max_length=3, separator="|"),
        "bucket": Bucketize(column="x", boundaries=(0.15, 1.0), max_length=3, separator="|"),
    }
    texts = [None, "", "1|2.5", "0.1|+.3|1e-3|7.", "-0|nan"]
    columns = Columns(features).fit([pa.table({"x": texts})])
    trained = columns.tensors(columns.encode(pa.table({"x": texts})), 5)
    served = columns.encoder.arrays_of_rows([{"x": text} for text in texts])
    assert all(np.array_equal(tensor.numpy(), served[name]) for name, tensor in trained.items())
    for text in ("1||2", "1| 2", "1_0", "x"):
        with pytest.raises(
            ValueError, match="column 'x': ('.*' is no number|could not convert string to float)"
        ):
            columns.encoder.arrays_of_rows([{"x": text}])
        with pytest.raises(DataError, match="column 'x': Failed to parse string"):
            columns({"x": [text]})
    with pytest.raises(ValueError, match="column 'x': int too large to convert to float"):
        columns.encoder.arrays_of_rows([{"x": [10**400]}])


def test_times_of_all_types_are_in_serving_what_they_are_in_training() -> None:
    features = {
        "hour": Time(column="at", part="hour"),
        "weekday": Time(column="at", part="weekday"),
        "day": Time(column="at", part="day"),
        "age": Age(
            column="at", until="2024-03-01T12:00:00+02:00", log=True, standardize=True, missing=-1.0
        ),
    }
    moments = [
        datetime(2024, 2, 29, 23, 59, 59, 999_999, tzinfo=timezone.utc),
        datetime(1969, 12, 31, 1, 30, tzinfo=timezone.utc),
        None,
        datetime(2021, 6, 6, tzinfo=timezone.utc),
    ]
    seconds = [moment and moment.timestamp() for moment in moments]
    texts = [moment and moment.isoformat() for moment in moments]
    dates = [moment and moment.date() for moment in moments]
    expected = {
        "hour": [moment.hour + 1 if moment else 0 for moment in moments],
        "weekday": [moment.weekday() + 1 if moment else 0 for moment in moments],
        "day": [moment.day if moment else 0 for moment in moments],
    }
    zoned = pa.array(moments, pa.timestamp("ns", tz="Europe/Rome"))
    for values, raw in (
        (zoned, texts),
        (pa.array(moments, pa.timestamp("us", tz="UTC")), seconds),
        (pa.array(texts), texts),
        (pa.array(texts).dictionary_encode(), seconds),
        (pa.array(seconds), texts),
        (pa.array(dates), [day and day.isoformat() for day in dates]),
        (
            pa.array([text and text.replace("+00:00", "") for text in texts]),
            [t and t.replace("+00:00", "Z") for t in texts],
        ),
    ):
        table = pa.table({"at": values})
        columns = Columns(features, form="padded").fit([table])
        trained = columns.tensors(columns.encode(table), 4)
        served = Encoder(json.loads(json.dumps(columns.to_plain()))).arrays_of_rows([
            {"at": value} for value in raw
        ])
        assert all(
            np.array_equal(tensor.numpy(), served[name]) for name, tensor in trained.items()
        ), values.type
        if not pa.types.is_date(values.type):
            assert {name: trained[name].tolist() for name in expected} == expected
    assert [columns.tables[name].rows for name in expected] == [25, 8, 32]
    with pytest.raises(
        DataError, match=r"'at': 1.7e\+12 is no time: write seconds since 1970, or ISO texts"
    ):
        columns({"at": [1.7e12]})
    with pytest.raises(ValueError, match="column 'at': Invalid isoformat string: 'yesterday'"):
        columns.encoder.arrays_of_rows([{"at": "yesterday"}])


def test_each_group_of_features_is_a_jagged_tensor_of_its_own() -> None:
    groups = {"user": "people", "friends": "people", "tags": "things", "visits": None}
    grouped = {
        name: feature | ({"group": groups[name]} if groups.get(name) else {})
        for name, feature in FEATURES.items()
    }
    columns, plain = (
        Columns(grouped, "clicked").fit([pa.table(ROWS)]),
        Columns(FEATURES).fit([pa.table(ROWS)]),
    )
    batch, expected = columns(ROWS), plain(ROWS)["ids"].to_dict()
    assert batch["people"].keys() == ["user", "friends"]
    assert batch["things"].keys() == ["tags"]
    assert batch["ids"].keys() == ["city", "age", "price_range", "user_in_city"]
    for group in ("people", "things", "ids"):
        for name, jagged in batch[group].to_dict().items():
            assert torch.equal(jagged.values(), expected[name].values())
            assert torch.equal(jagged.lengths(), expected[name].lengths())
    rows = [
        {name: values[number] for name, values in ROWS.items() if name != "clicked"}
        for number in range(5)
    ]
    served = Encoder(json.loads(json.dumps(columns.to_plain()))).arrays_of_rows(rows)
    assert np.array_equal(served["people.values"], batch["people"].values())
    assert np.array_equal(served["things.lengths"], batch["things"].lengths())
    for features, form in (
        ({"a": Hash(rows=9, group="b"), "b": Number()}, "jagged"),
        ({"a": Hash(rows=9, group="g")}, "padded"),
    ):
        with pytest.raises(
            ConfigError, match="group=.*: groups are KeyedJaggedTensors of form='jagged'"
        ):
            Columns(features, form=form)  # type: ignore[arg-type]
