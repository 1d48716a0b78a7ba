"""What is fitted in parts, on workers of Dask or elsewhere is what one process fits."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from dask.sizeof import sizeof
from pyarrow import csv, parquet

from lightning_distrec.cli.main import main
from lightning_distrec.data import (
    Bucketize,
    ColumnData,
    Columns,
    Number,
    Vector,
    Vocabulary,
    fitting,
)
from lightning_distrec.errors import ConfigError, DataError

NUM_ROWS = 1_200_000
FEATURES = {
    "user": {"kind": "vocabulary", "rows": 9_000},
    "friends": {"kind": "vocabulary", "rows": 9_000, "table": "user", "max_length": 3, "separator": "|"},
    "city": {"kind": "vocabulary", "rows": 30, "min_count": 40},
    "price": {"kind": "number", "standardize": True, "log": True},
    "range": {"kind": "bucketize", "column": "price", "quantiles": 100},
    "rare": {"kind": "bucketize", "quantiles": 10},
    "score": {"kind": "number", "column": "scores", "key": "city", "standardize": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def clicks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return files of row groups of unequal sizes, with missing values, integers and dictionaries."""
    draw = np.random.default_rng(5)
    folder = tmp_path_factory.mktemp("clicks")
    users = (draw.zipf(1.2, NUM_ROWS) % 20_000).astype(str)
    friends = [f"{a}|{b}" for a, b in draw.integers(0, 20_000, (1000, 2)).tolist()]
    prices = draw.lognormal(3, 2, NUM_ROWS)
    row = pa.array(np.arange(NUM_ROWS) % 3)
    table = pa.table({
        "user": pa.array(users, mask=draw.random(NUM_ROWS) < 0.1),
        "friends": pa.array(friends).take(draw.integers(0, 1000, NUM_ROWS)),
        "city": draw.zipf(1.5, NUM_ROWS) % 1000,
        "price": pa.array(prices, mask=draw.random(NUM_ROWS) < 0.1),
        "rare": pa.array(prices, mask=draw.random(NUM_ROWS) < 0.99),
        "scores": pa.array([{"1": 0.5, "2": 2.0}, {"1": 4.0}, None]).take(row),
        "label": draw.integers(0, 2, NUM_ROWS),
    })
    parquet.write_table(table.slice(0, 700_000), folder / "a.parquet", row_group_size=70_001)
    parquet.write_table(table.slice(700_000), folder / "b.parquet", row_group_size=30_011)
    return folder


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    with fitting.connected(None) as client:
        client.wait_for_workers(2, timeout=60)
        yield client


def test_workers_of_which_one_dies_fit_what_one_process_fits(
    clicks: Path, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = ColumnData(str(clicks), FEATURES, "label")
    expected = data._prepare()["columns"]
    assert len(expected["vocabularies"]["user"]) == 8_999
    assert len(expected["boundaries"]["range"]) == 99
    # Of 1,080,000 prices a sample is drawn.
    price = parquet.read_table(clicks)["price"].drop_null().to_numpy()
    below = np.searchsorted(np.sort(price), expected["boundaries"]["range"]) / len(price)
    np.testing.assert_allclose(below, np.arange(1, 100) / 100, atol=0.0027)
    logs = np.log1p(price)
    assert expected["moments"]["price"] == pytest.approx([logs.mean(), logs.std()])
    monkeypatch.setattr(fitting, "TASK_ROWS", 100_000)
    monkeypatch.setattr(fitting, "SHARE_VALUES", 3_000)
    killed = []
    advance = fitting.Progress.advance

    def kill_first(*arguments: Any) -> None:
        if not killed:
            killed.append(next(iter(client.run(os.getpid).values())))
            os.kill(killed[0], signal.SIGKILL)
        advance(*arguments)

    monkeypatch.setattr(fitting.Progress, "advance", kill_first)
    assert data._prepare(client)["columns"] == expected
    assert killed
    assert killed[0] not in client.run(os.getpid).values()


def test_the_command_fits_on_a_cluster_what_a_job_then_takes(
    clicks: Path,
    client: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = {"train": f"{clicks}/*.parquet", "features": FEATURES, "label": "label"}
    settings["cache_dir"] = str(tmp_path / "cache")
    job = {
        "model": {"class_path": "lightning.pytorch.demos.boring_classes.BoringModel"},
        "data": {"class_path": "lightning_distrec.data.ColumnData", "init_args": settings},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    command = ["columns", "fit", "--config", str(tmp_path / "job.yaml"), "--scheduler"]
    assert main([*command, client.scheduler.address]) == 0
    printed = capsys.readouterr()
    assert "8,999 values for 9,000 rows" in printed.out
    (path,) = (tmp_path / "cache").glob("*.json")
    assert str(path) in printed.err
    monkeypatch.setattr(ColumnData, "_prepare", None)  # nothing is fitted again
    data = ColumnData(**settings)
    data.prepare_data()
    data.setup()
    monkeypatch.undo()
    assert data.columns.to_plain() == ColumnData(**settings)._prepare()["columns"]
    monkeypatch.setattr(fitting, "SILENT_SECONDS", 1)
    assert main([*command, "tcp://127.0.0.1:9"]) == 2
    assert "no scheduler of Dask answers within 1 s" in capsys.readouterr().err


def test_dask_knows_how_large_counts_are() -> None:
    counts = Columns({"user": Vocabulary(rows=9)}).statistics()["vocabulary", "user"]
    counts.add(pa.table({"user": list(map(str, range(10_000)))}), 0)
    assert sizeof(counts) > 200_000
    assert sizeof(counts.split(4)) == pytest.approx(sizeof(counts), rel=0.1)


def test_an_error_of_a_worker_names_the_file_and_the_column(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "TASK_ROWS", 1)
    numbers = pa.array([1.0, 2.0, float("inf"), 4.0])
    parquet.write_table(pa.table({"price": numbers}), tmp_path / "a.parquet", row_group_size=2)
    data = ColumnData(
        str(tmp_path), {"price": Number(standardize=True)}, cache_dir=str(tmp_path / "c")
    )
    with pytest.raises(DataError, match=r"a\.parquet, row group 1, column 'price': inf in row 0"):
        data.fit_features(client)
    with pytest.raises(DataError, match=r"row group 1, column 'price': inf"):
        data.setup()
    with pytest.raises(ConfigError, match="in memory is fitted by setup"):
        ColumnData(pa.table({"price": numbers}), {"price": Number()}).fit_features(client)


def test_what_others_have_counted_is_what_is_counted_here(tmp_path: Path) -> None:
    cities = ["Rom", "Bern", "007", "Bern", "Bern", "Rom", "7", None]
    prices = [1.0, 2.0, 4.0, 8.0, 9.0, 20.0, 21.0, 30.0]
    table = pa.table({"city": cities, "price": prices})
    counted = Columns({
        "city": Vocabulary(rows=9),
        "price": Number(standardize=True),
        "range": Bucketize(column="price", quantiles=4),
    }).fit([table])
    plain = counted.to_plain()
    counts = pa.table({"value": ["Bern", "007", "7", "Rom"], "count": [3, 1, 1, 2]})
    parquet.write_table(counts, tmp_path / "cities.parquet")
    csv.write_csv(counts, tmp_path / "cities.csv")
    csv.write_csv(pa.table({"value": plain["vocabularies"]["city"]}), tmp_path / "ordered.csv")
    (tmp_path / "moments.json").write_text(json.dumps(plain["moments"]["price"]))
    (tmp_path / "boundaries.json").write_text(json.dumps(plain["boundaries"]["range"]))
    for name in ("cities.parquet", "cities.csv", "ordered.csv"):
        columns = Columns({
            "city": Vocabulary(rows=9, file=str(tmp_path / name)),
            "price": Number(standardize=True, moments=str(tmp_path / "moments.json")),
            "range": Bucketize(column="price", boundaries=str(tmp_path / "boundaries.json")),
        })
        # No pass over the data is made.
        columns.fit(iter([table.slice(0, 0), None]))
        assert not columns.statistics()
        for fact in ("vocabularies", "boundaries", "moments"):
            assert columns.to_plain()[fact] == plain[fact]
        assert columns.to_plain()["features"]["city"] == plain["features"]["city"]
    few = Columns({"city": Vocabulary(rows=3, min_count=2, file=str(tmp_path / "cities.csv"))})
    assert few.fit([table]).to_plain()["vocabularies"] == {"city": ["Bern", "Rom"]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"city": ["Rom"]}, "there is no column 'value', but city"),
        ({"value": ["Rom", None]}, "'value' has missing values"),
        ({"value": ["7", "Rom", "7"]}, "the value '7' is there more than once"),
        ({"value": [0.5]}, "column 'value' has the type double: vocabulary needs texts"),
        ({"value": list("abcdefghi")}, r"there are 9 values, rows=9, .* Set rows=10 or more"),
        ({"value": ["a"], "count": [0.5]}, "'count' must be integers"),
        ({"value": ["a"], "count": np.array([2**63], np.uint64)}, "9223372036854775808 not in"),
        (None, "No such file"),
    ],
)
def test_a_vocabulary_file_that_does_not_fit_is_refused(
    values: dict[str, list[Any]] | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "cities.parquet"
    if values is not None:
        parquet.write_table(pa.table(values), file)
    features = {"city": Vocabulary(rows=9, file=str(file)), "price": Number(standardize=True)}
    # The data, which does not fit either, is not read first.
    data = ColumnData(pa.table({"city": ["Rom"], "price": [float("inf")]}), features)
    with pytest.raises(DataError, match=message) as refused:
        data.setup()
    assert "cities.parquet" in str(refused.value)


@pytest.mark.parametrize(
    ("feature", "settings", "message"),
    [
        (Vocabulary, {"rows": 9, "file": "cities.txt"}, "file=cities.txt: the name must end in"),
        (Number, {"moments": [0, 1]}, "set standardize=true"),
        (Number, {"standardize": True, "moments": [0, 0]}, "a standard deviation above 0"),
        (Number, {"standardize": True, "moments": "none.json"}, "it is no list of numbers"),
        (Bucketize, {"boundaries": [1, float("nan")]}, "numbers must be finite"),
        (Number, {"missing": float("nan")}, "missing=nan: .* must be finite"),
        (Vector, {"size": 2, "missing": float("inf")}, "missing=inf: .* must be finite"),
    ],
)  # fmt: skip
def test_numbers_that_cannot_be_are_refused(
    feature: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        feature(**settings)
