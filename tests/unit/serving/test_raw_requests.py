"""A folder of a model that was trained on columns answers raw values, as the trained module answers
their batch."""

import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from lightning_distrec.cli.main import main
from lightning_distrec.errors import CheckpointError
from lightning_distrec.serving.answer import Server
from lightning_distrec.serving.artifact import RawRows, export_for_serving
from tests.support.column_models import FEATURES, ColumnModel, click_data, write_clicks, write_job
from tests.support.environments import environment
from tests.support.served_folder import RUN, WITHOUT, ask

ROWS: list[dict[str, Any]] = [
    {"row": 1, "user": "u3", "history": ["i3", "i29", "never seen"], "price": 12.5},
    {"user": "never seen", "history": []},
    {"user": 3, "price": None, "history": None, "row": 7},
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ColumnModel, Any]:
    """Train, change the data, and export: the folder, the module and its data."""
    folder = tmp_path_factory.mktemp("columns")
    file = write_clicks(folder)
    model, data = ColumnModel(), click_data(file, batch_size=32)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=20,
        max_epochs=5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, data)
    trainer.save_checkpoint(folder / "clicks.ckpt")
    table = parquet.read_table(file)
    parquet.write_table(table.set_column(2, "history", pa.array([["other"]] * len(table))), file)
    write_job(folder / "clicks.yaml", "tests.support.column_models.ColumnModel", file)
    arguments = ["--format", "torch.export", "--config", str(folder / "clicks.yaml")]
    assert main(["export", str(folder / "clicks.ckpt"), str(folder / "served"), *arguments]) == 0
    return folder / "served", model.eval(), data


def answer_of_module(model: ColumnModel, data: Any, rows: list[dict[str, Any]]) -> list[float]:
    lists = {column: [row.get(column) for row in rows] for column in FEATURES}
    # A column of texts and integers is one of texts.
    lists["user"] = [str(user) for user in lists["user"]]
    with torch.no_grad():
        return model.predict_step(data.columns(lists), 0).tolist()


def test_raw_rows_are_answered_to_the_digit_without_this_package(
    trained: tuple[Path, ColumnModel, Any],
) -> None:
    folder, model, data = trained
    (folder.parent / "rows.json").write_text(json.dumps(ROWS))
    printed = ask(folder, ["../rows.json"])
    assert json.loads(printed[0]) == answer_of_module(model, data, ROWS)
    server = Server(folder)
    assert server.answer_plain(ROWS[0]) == pytest.approx(
        answer_of_module(model, data, ROWS)[:1], abs=1e-7
    )
    # The mapping is that of the checkpoint: the file had another history when the folder was
    # written.
    assert "i5" in server.encoder.plain["vocabularies"]["history"]
    first = json.loads((folder / "request.json").read_text())
    assert first[0].keys() == FEATURES.keys()
    assert len(server.answer_plain(first)) == 1


@pytest.mark.slow
def test_http_answers_as_the_script_and_says_what_is_wrong(
    trained: tuple[Path, ColumnModel, Any],
) -> None:
    folder, model, data = trained
    command = [sys.executable, "-c", WITHOUT + RUN.format(["--http", "0"])]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment()
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().partition(": send")[0]

        def post(content: bytes) -> Any:
            with urllib.request.urlopen(urllib.request.Request(url, content), timeout=60) as answer:
                return json.loads(answer.read())

        assert url.startswith("http://127.0.0.1:")
        assert post(json.dumps(ROWS).encode()) == answer_of_module(model, data, ROWS)
        for content, message in (
            (b'{"userr": 1}', "there is no column 'userr'"),
            (b'{"price": "12"}', "column 'price': '12' is no number"),
            (b"[1]", "a row of values by column, or a list of rows"),
            (b"[]", "a list of rows, one or more"),
            (b"{", "Expecting property name"),
        ):
            with pytest.raises(urllib.error.HTTPError) as refused:
                post(content)
            assert refused.value.code == 400
            assert message in json.loads(refused.value.read())["error"]
    finally:
        process.kill()
        process.wait()


def test_a_changed_mapping_is_noticed_and_so_are_rows_of_another_batch(
    trained: tuple[Path, ColumnModel, Any], tmp_path: Path
) -> None:
    folder, model, data = trained
    raw = RawRows(mapping=data.columns.to_plain(), rows=[{"user": "u1"}, {"user": "u2"}])
    with pytest.raises(CheckpointError, match="raw rows become other inputs than the batch has"):
        export_for_serving(
            model, data.columns({c: [None, None] for c in FEATURES}), tmp_path / "other", raw=raw
        )
    text = (folder / "columns.json").read_text()
    (folder / "columns.json").write_text(text.replace('"rows": 50', '"rows": 49'))
    with pytest.raises(ValueError, match=r"columns\.json is damaged"):
        Server(folder)
    (folder / "columns.json").write_text(text)
