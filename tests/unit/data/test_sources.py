"""Files, folders, text, stores and tables give the same rows; what is wrong is an error that says
where."""

import os
import sys
from pathlib import Path
from typing import Any

import datasets
import fsspec
import lightning.pytorch as pl
import numpy as np
import pandas as pd
import polars
import pyarrow as pa
import pytest
import torch
from pyarrow import fs, parquet
from torch import Tensor, nn

from lightning_distrec.data import ColumnData, Hash, Number, Vocabulary
from lightning_distrec.errors import ConfigError, DataError, MissingPackageError
from tests.support.trainers import DEFAULTS

FEATURES = {
    "user": Hash(rows=1000),
    "city": Vocabulary(rows=5),
    "tags": Vocabulary(rows=9, max_length=4, separator="|"),
    "price": Number(log=True, standardize=True),
}


@pytest.fixture
def frame() -> pd.DataFrame:
    draw = np.random.default_rng(3)
    return pd.DataFrame({
        "user": [f"u{number}" for number in draw.integers(0, 99, 500)],
        "city": draw.choice(["Bern", "NA", "007", None], 500),
        "tags": draw.choice(["a|b", "", "c", None], 500),
        "price": np.where(draw.random(500) < 0.1, np.nan, draw.lognormal(size=500)),
        "y": draw.integers(0, 2, 500),
    })


def data_of(source: object, cache: Path, **options: object) -> ColumnData:
    data = ColumnData(source, FEATURES, "y", cache_dir=str(cache), batch_size=500, **options)
    data.prepare_data()
    data.setup()
    return data


def batch_of(source: object, cache: Path, **options: object) -> dict[str, torch.Tensor]:
    data = data_of(source, cache, **options)
    (batch,) = data._loader("train")
    ids = batch.pop("ids")
    return {**batch, "values": ids.values(), "lengths": ids.lengths()}


def test_all_sources_of_the_same_rows_give_the_same_batch(
    frame: pd.DataFrame, tmp_path: Path
) -> None:
    expected = batch_of(frame, tmp_path)
    assert (expected["values"] == 0).any()
    table = pa.Table.from_pandas(frame, preserve_index=False)
    folder = tmp_path / "parts"
    folder.mkdir()
    for number in range(5):
        parquet.write_table(
            table.slice(100 * number, 100), folder / f"{number}.parquet", row_group_size=40
        )
    frame.to_csv(tmp_path / "rows.csv", index=False)
    frame.to_csv(tmp_path / "rows.tsv.gz", index=False, header=False, sep="\t")
    store = fsspec.filesystem("memory")
    for number in range(5):
        for place in ("bucket", "bucket/parts"):
            with store.open(f"/{place}/{number}.parquet", "wb") as file:
                file.write((folder / f"{number}.parquet").read_bytes())
    polars_frame = polars.from_arrow(table)
    coded = polars_frame.with_columns(polars.col("city").cast(polars.Categorical))
    sources = {
        "table": (table, {}),
        "polars": (polars_frame, {}),
        "polars, lazy, categories": (coded.lazy(), {}),
        "datasets": (datasets.Dataset(table).with_format("arrow")[:], {}),
        "folder": (str(folder), {}),
        "glob": (str(folder / "*.parquet"), {}),
        "list": ([str(folder / f"{number}.parquet") for number in range(5)], {}),
        "csv": (str(tmp_path / "rows.csv"), {}),
        "without a header": (
            str(tmp_path / "rows.tsv.gz"),
            {"delimiter": "\t", "column_names": list(frame)},
        ),
        "glob in a store": ("memory://bucket/*.parquet", {}),
        "folder in a store": ("memory://bucket/parts", {}),
        "url": (folder.as_uri(), {}),
    }
    for name, (source, options) in sources.items():
        actual = batch_of(source, tmp_path / "cache", **options)
        assert actual.keys() == expected.keys()
        for part, tensor in expected.items():
            # Sums in another order: the mean of prices may differ in its last bit.
            assert torch.allclose(actual[part].double(), tensor.double(), atol=1e-6), (name, part)


def test_files_in_a_bucket_give_the_rows_of_the_table(
    frame: pd.DataFrame, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moto = pytest.importorskip("moto.server", reason="an S3 server: needs moto[server]")
    server = moto.ThreadedMotoServer(port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name, value in (
            ("ACCESS_KEY_ID", "a"),
            ("SECRET_ACCESS_KEY", "b"),
            ("DEFAULT_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(f"AWS_{name}", value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        store, _ = fs.FileSystem.from_uri("s3://bucket/?allow_bucket_creation=true")
        store.create_dir("bucket")
        parquet.write_table(
            pa.Table.from_pandas(frame),
            "bucket/day/0.parquet",
            filesystem=store,
            row_group_size=200,
        )
        with store.open_output_stream("bucket/rows.csv") as file:
            file.write(frame.to_csv(index=False).encode())
        expected = batch_of(frame, tmp_path)
        for source in ("s3://bucket/day", "s3://bucket/*/0.parquet", "s3://bucket/rows.csv"):
            for num_workers in (0, 1):
                actual = batch_of(source, tmp_path / "cache", num_workers=num_workers)
                for part, tensor in expected.items():
                    assert torch.allclose(actual[part].double(), tensor.double(), atol=1e-6), (
                        source,
                        part,
                    )
        (
            data := ColumnData("s3://bucket/none.parquet", FEATURES, cache_dir=str(tmp_path))
        ).prepare_data()
        with pytest.raises(DataError, match="none.parquet: there is no such file"):
            data.setup()
    finally:
        server.stop()


def test_features_are_fitted_once_and_again_when_the_data_changes(
    frame: pd.DataFrame, tmp_path: Path
) -> None:
    file, cache = tmp_path / "rows.parquet", tmp_path / "cache"
    frame.to_parquet(file)
    data_of(str(file), cache)
    (prepared,) = cache.glob("*.json")
    written = prepared.stat().st_mtime_ns
    data_of(str(file), cache)
    assert prepared.stat().st_mtime_ns == written
    frame.head(90).to_parquet(file)
    assert len(data_of(str(file), cache).train_dataloader()) == 1
    assert len(list(cache.glob("*.json"))) == 2


def test_a_checkpoints_features_replace_those_of_the_data(
    frame: pd.DataFrame, tmp_path: Path
) -> None:
    state = data_of(frame, tmp_path).state_dict()
    other = data_of(frame.assign(city="Rom"), tmp_path)
    other.load_state_dict(state)
    assert "Bern" in other.columns.to_plain()["vocabularies"]["city"]
    changed = ColumnData(frame, {**FEATURES, "user": Hash(rows=999)}, "y")
    with pytest.raises(ConfigError, match="the checkpoint was trained with another feature 'user'"):
        changed.load_state_dict(state)


class Mean(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return (self.weight - batch["label"]).square().mean()

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_trained_module_is_not_given_data_that_map_values_otherwise(
    frame: pd.DataFrame, tmp_path: Path
) -> None:
    model = Mean()
    data = ColumnData(frame, FEATURES, "y", test=frame)
    trainer = pl.Trainer(**DEFAULTS, max_steps=1)
    trainer.fit(model, data)
    trainer.save_checkpoint(tmp_path / "it.ckpt")
    for same in (data, ColumnData(frame, FEATURES, "y", test=frame)):
        pl.Trainer(**DEFAULTS, max_steps=1).fit(model, same)
        pl.Trainer(**DEFAULTS).test(model, same)
    moved = ColumnData(frame.assign(city=frame["city"].str[::-1]), FEATURES, "y", test=frame)
    dearer = ColumnData(frame.assign(price=2.5 * frame["price"]), FEATURES, "y", test=frame)
    for other, message in (
        (moved, "map 'city' otherwise: vocab"),
        (dearer, "map 'price' otherwise"),
    ):
        with pytest.raises(ConfigError, match=message):
            pl.Trainer(**DEFAULTS, max_steps=1).fit(model, other)
        with pytest.raises(ConfigError, match=message):
            pl.Trainer(**DEFAULTS).test(model, other)
        pl.Trainer(**DEFAULTS).test(model, other, ckpt_path=str(tmp_path / "it.ckpt"))
        assert other.columns.to_plain() == data.columns.to_plain()
        pl.Trainer(**DEFAULTS, max_steps=2).fit(model, other)  # with the features that are loaded
    pl.Trainer(**DEFAULTS, max_steps=1).fit(Mean(), moved)


def test_tables_in_memory_are_known_by_rows_from_all_of_them(
    frame: pd.DataFrame, tmp_path: Path
) -> None:
    later = frame.assign(city=frame["city"].where(frame.index < 300, "Rom"))
    first, same, second = (
        data_of(rows, tmp_path).train_dataloader().state_dict() for rows in (frame, frame, later)
    )
    assert first == same != second


def test_predictions_need_no_labels_and_no_training_data(
    frame: pd.DataFrame, tmp_path: Path
) -> None:
    state = data_of(frame, tmp_path).state_dict()
    frame.drop(columns="y").to_parquet(tmp_path / "new.parquet")
    data = ColumnData(
        features=FEATURES,
        label="y",
        predict=str(tmp_path / "new.parquet"),
        cache_dir=str(tmp_path / "c"),
    )
    data.prepare_data()
    data.setup("predict")
    data.load_state_dict(state)
    (batch,) = data.predict_dataloader()
    assert "label" not in batch
    assert len(batch["dense"]) == 500
    with pytest.raises(ConfigError, match="there is no data for train"):
        data.train_dataloader()
    with pytest.raises(ConfigError, match="there is no data: set train"):
        ColumnData(features=FEATURES)
    with pytest.raises(DataError, match="nothing is prepared. Call prepare_data first"):
        ColumnData(str(tmp_path / "new.parquet"), FEATURES, cache_dir=str(tmp_path / "d")).setup()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("column", r"1\.parquet: there is no column 'city', but user, tags"),
        ("type", r"1\.parquet: column 'price' has the type (large_)?string: number needs numbers"),
        ("no parquet", r"1\.parquet: .*Parquet"),
        ("text", r"1\.csv: .*CSV column #3.*twelve"),
    ],
)
def test_a_bad_file_is_named_before_training_by_every_rank(
    frame: pd.DataFrame, tmp_path: Path, kind: str, message: str
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    frame.to_parquet(folder / "0.parquet")
    if kind == "column":
        frame.drop(columns="city").to_parquet(folder / "1.parquet")
    elif kind == "type":
        frame.assign(price="x").to_parquet(folder / "1.parquet")
    elif kind == "no parquet":
        (folder / "1.parquet").write_bytes(b"PAR1" + bytes(100))
    else:
        prices = ["12.5"] * 499 + ["twelve"]
        frame.assign(price=prices).to_csv(folder / "1.csv", index=False)
    ColumnData(str(folder), FEATURES, "y", cache_dir=str(tmp_path)).prepare_data()
    for _ in range(2):  # ranks that did not prepare
        with pytest.raises(DataError, match=message):
            ColumnData(str(folder), FEATURES, "y", cache_dir=str(tmp_path)).setup()


def write_unnoticed(file: Path, content: bytes) -> None:
    """Write content of the same size, as if it were damaged on its way."""
    before = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_file_that_changes_after_its_rows_were_counted_is_an_error(
    frame: pd.DataFrame, tmp_path: Path
) -> None:
    for number in range(4):
        frame.to_parquet(tmp_path / f"{number}.parquet")
    for change in (frame.head(90), pd.concat([frame, frame]), None):
        data = data_of(str(tmp_path / "?.parquet"), tmp_path / "cache", buffer_rows=500)
        file = tmp_path / "2.parquet"
        file.unlink()
        if change is not None:
            change.to_parquet(file)
        with pytest.raises(
            DataError,
            match=r"2\.parquet, row group 0, the file has changed since its rows were counted",
        ):
            list(data.train_dataloader())
        frame.to_parquet(file)
    # Text is converted once: later changes are those of the next run.
    frame.to_csv(tmp_path / "rows.csv", index=False)
    data = data_of(str(tmp_path / "rows.csv"), tmp_path / "cache")
    frame.head(9).to_csv(tmp_path / "rows.csv", index=False)
    assert sum(len(batch["label"]) for batch in data.train_dataloader()) == 500


def test_a_number_that_cannot_be_fitted_is_named_by_file_row_group_row_and_column(
    frame: pd.DataFrame, tmp_path: Path
) -> None:
    frame.loc[307, "price"] = np.inf
    parquet.write_table(pa.Table.from_pandas(frame), tmp_path / "rows.parquet", row_group_size=100)
    with pytest.raises(
        DataError,
        match=r"rows\.parquet, row group 3, column 'price': inf in row 7 is no finite number",
    ):
        data_of(str(tmp_path / "rows.parquet"), tmp_path)


def test_line_breaks_in_quotes_cut_no_row_in_any_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_distrec.data.row_groups.CSV_BLOCK_BYTES", 4096)
    users = [f"u{number}" for number in range(900)]
    lines = "".join(f'{user},"good\nreally, nice {user}",1\n' for user in users)
    for shift in range(3):
        file = tmp_path / f"{shift}.csv"
        file.write_text(f"user,review,y\n{'x' * shift},u,1\n{lines}")
        features = {"user": Vocabulary(rows=1000), "review": Vocabulary(rows=1000)}
        data = ColumnData(str(file), features, "y", cache_dir=str(tmp_path / "cache"))
        data.prepare_data()
        data.setup()
        assert sum(group.num_rows for group in data.groups["train"]) == 901
        assert set(users) <= set(data.columns.to_plain()["vocabularies"]["user"])


def test_bad_bytes_and_values_are_named_by_file_row_group_and_column(
    frame: pd.DataFrame, tmp_path: Path
) -> None:
    file = tmp_path / "rows.parquet"
    parquet.write_table(
        pa.Table.from_pandas(frame),
        file,
        row_group_size=100,
        compression="snappy",
        use_dictionary=False,
    )
    data = data_of(str(file), tmp_path / "cache")
    column = parquet.ParquetFile(file).metadata.row_group(2).column(0)
    content = bytearray(file.read_bytes())
    content[column.data_page_offset : column.data_page_offset + 60] = bytes(60)
    write_unnoticed(file, bytes(content))
    with pytest.raises(DataError, match=r"rows\.parquet, row group 2, column 'user': "):
        list(data._loader("train"))
    required = {**FEATURES, "city": Vocabulary(rows=5, required=True)}
    bad = ColumnData(frame, required, "y")
    bad.setup()
    with pytest.raises(
        DataError, match="the table, row group 0, column .*'city' has required=True"
    ):
        list(bad.train_dataloader())


def test_a_label_out_of_range_is_an_error_before_training(
    frame: pd.DataFrame, tmp_path: Path
) -> None:
    wrong = frame.assign(y=frame["y"].where(frame.index != 450, -1.5))
    parquet.write_table(pa.Table.from_pandas(wrong), tmp_path / "rows.parquet", row_group_size=100)
    data_of(str(tmp_path / "rows.parquet"), tmp_path)  # any number, unless a range is set
    for source in (wrong, str(tmp_path / "rows.parquet")):
        with pytest.raises(
            DataError, match="column 'y' has the label -1.5, which label_range excludes: 0 to 1"
        ):
            data_of(source, tmp_path, label_range=[0, 1], val=0.2)
    data = ColumnData(frame, FEATURES, "y", predict=wrong.drop(columns="y"), label_range=[0, 1])
    data.setup()


def test_impossible_sources_are_refused(tmp_path: Path) -> None:
    for source, message in (
        (str(tmp_path / "none.parquet"), "there is no such file"),
        (str(tmp_path / "*.parquet"), "there is no such file"),
        (__file__, "the name must end in"),
    ):
        (data := ColumnData(source, FEATURES, "y", cache_dir=str(tmp_path))).prepare_data()
        with pytest.raises(DataError, match=message):  # on every rank
            data.setup()
    with pytest.raises(ConfigError, match="data is a int"):
        ColumnData(7, FEATURES, "y").setup()
    with pytest.raises(ConfigError, match="batch_size=0"):
        ColumnData("x", FEATURES, "y", batch_size=0)


def test_without_pyarrow_the_room_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_distrec.errors.find_spec", lambda name: None)
    room = sys.modules["lightning_distrec.data"]
    with pytest.raises(
        MissingPackageError, match="lightning_distrec.data needs the package pyarrow"
    ):
        exec(compile(Path(room.__file__).read_text(), room.__file__, "exec"), {})


def test_kept_columns_are_those_of_text_and_tables_too(tmp_path: Path) -> None:
    table = pa.table({"row": [1.0, 2.0], "note": ["a", None]})
    lists = table.append_column("tags", [[["x", "y"], None]])
    parquet.write_table(lists, tmp_path / "rows.parquet", row_group_size=1)
    data = ColumnData(
        predict=str(tmp_path / "rows.parquet"),
        features={"row": Number()},
        keep=["note", "tags"],
        cache_dir=str(tmp_path / "cache"),
    )
    data.prepare_data()
    data.setup("predict")
    kept = data.predict_dataloader().dataset.kept_columns()
    assert kept.equals(lists.select(["note", "tags"]))  # no dictionaries
    (tmp_path / "rows.csv").write_text("row,note\n1,a\n2,\n")
    for source in (table, str(tmp_path / "rows.csv")):
        features = {"row": Number()}
        data = ColumnData(
            predict=source, features=features, keep=["note"], cache_dir=str(tmp_path / "cache")
        )
        data.prepare_data()
        data.setup("predict")
        assert data.predict_dataloader().dataset.kept_columns().to_pydict() == {"note": ["a", None]}
        data = ColumnData(
            predict=source, features=features, keep=["other"], cache_dir=str(tmp_path)
        )
        data.prepare_data()
        with pytest.raises(
            DataError,
            match="there is no column 'other'|Column 'other' in include_columns does not exist",
        ):
            data.setup()
    with pytest.raises(ConfigError, match="keep=.*: its columns are those of predict"):
        ColumnData(table, features, keep=["note"])
