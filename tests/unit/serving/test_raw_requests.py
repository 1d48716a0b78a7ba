"""A folder of a model that was trained on columns answers raw values, as the trained module answers
their batch."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from lightning_distrec.cli.main import main
from lightning_distrec.errors import CheckpointError
from lightning_distrec.serving import answer, app
from lightning_distrec.serving.answer import Server
from lightning_distrec.serving.artifact import RawRows, export_for_serving
from tests.support.column_models import FEATURES, ColumnModel, click_data, write_clicks, write_job
from tests.support.served_app import running_app
from tests.support.served_folder import ask
from tests.support.trainers import one_process_trainer

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
    trainer = one_process_trainer(max_steps=20, max_epochs=5)
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


def joining(folder: Path, monkeypatch: pytest.MonkeyPatch) -> app.API:
    """Return what a worker has that joins requests."""
    monkeypatch.setattr(answer, "FOLDER", folder)
    api = app.API("", max_batch_size=8)
    api._server = Server(folder)
    api._check_joining(answer)
    return api


def test_joined_requests_are_answered_by_one_call_and_bad_ones_among_them_alone(
    trained: tuple[Path, ColumnModel, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = joining(trained[0], monkeypatch)
    server = api._server
    requests = [ROWS[0], ROWS[1:], [{"user": "u7"}, ROWS[0]], {"history": ["i3"] * 9}]
    alone = [server.answer_plain(request) for request in requests]
    calls = []
    monkeypatch.setattr(api._server, "program", lambda *inputs: calls.append(0) or program(*inputs))
    program = Server(trained[0]).program
    joined = [json.loads(response.body) for response in api.predict(requests)]
    assert len(calls) == 1
    for together, single in zip(joined, alone, strict=True):
        # Sums of floats depend on how many rows there are.
        assert together == pytest.approx(single, abs=1e-6)
    responses = api.predict([ROWS[0], {"userr": 1}, ROWS[1:], [], "text", {"price": "12"}])
    assert [response.status_code for response in responses] == [200, 400, 200, 400, 400, 400]
    answered = [json.loads(response.body) for response in responses]
    assert answered[:3:2] == alone[:2]
    for number, message in (
        (1, "there is no column 'userr'"),
        (3, "a list of rows, one or more"),
        (4, "a row of values by column, or a list of rows"),
        (5, "column 'price': '12' is no number"),
    ):
        assert message in answered[number]["detail"]


class Centred(ColumnModel):
    """Answers to a row depend on the others."""

    def predict_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        """Return scores around 0."""
        scores = super().predict_step(batch, batch_idx)
        return scores - scores.mean()


def test_requests_whose_rows_depend_on_each_other_are_not_joined(
    trained: tuple[Path, ColumnModel, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = trained[2]
    rows = json.loads((trained[0] / "request.json").read_text()) + ROWS[:1]
    batch = data.columns({name: [row[name] for row in rows] for name in FEATURES})
    raw = RawRows(mapping=data.columns.to_plain(), rows=rows)
    export_for_serving(Centred(), batch, tmp_path / "served", raw=raw)
    with pytest.raises(ValueError, match="whose answers do not depend on the rows beside them"):
        joining(tmp_path / "served", monkeypatch)


@pytest.mark.slow
def test_clients_at_once_are_joined_by_http(trained: tuple[Path, ColumnModel, Any]) -> None:
    folder = trained[0]
    server = Server(folder)
    with running_app(folder, "--max_batch_size", "16", "--batch_timeout", "0.05") as http:
        requests = [{"user": f"u{number}", "price": number} for number in range(60)]
        bad = {"price": "12"}
        sent = [http.sent("POST", "/predict", http.body(request)) for request in [*requests, bad]]
        answers = [http.answer(connection) for connection in sent]
    assert answers[-1].status == 400
    assert "column 'price': '12' is no number" in answers[-1].content["detail"]
    for request, answered in zip(requests, answers[:-1], strict=True):
        assert answered.content == pytest.approx(server.answer_plain(request), abs=1e-6)


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
