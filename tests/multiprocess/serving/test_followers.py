"""What reads publications: a served folder by HTTP with raw values, and a store by the page's reader."""

import json
import re
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from pyarrow import parquet

from lightning_distrec import PublishRows
from lightning_distrec.checkpoint.contents import read_contents
from lightning_distrec.serving.artifact import RawRows, export_for_serving
from lightning_distrec.sharding.mapping.id_mapping import mixed
from tests.support.column_models import ColumnModel, click_data, write_clicks
from tests.support.publishing_model import NUM_ROWS, one_by_one, train_and_publish
from tests.support.ranks import run_on_warm_ranks
from tests.support.served_app import running_app
from tests.support.trainers import DEFAULTS

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how_to" / "serve_while_training.md"
WAIT_SECONDS = 60
NUM_NEWEST = 30


def reader_of_the_page() -> Any:
    """Return `take_over`, as the page shows it."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (block,) = [block for block in blocks if "def take_over" in block]
    names: dict[str, Any] = {}
    exec(block.partition("\n\n\nstore = ")[0], names)
    return names["take_over"]


def test_a_store_has_the_rows_of_raw_ids(tmp_path: Path) -> None:
    run_on_warm_ranks(train_and_publish, 2, str(tmp_path), 12)
    take_over = reader_of_the_page()
    store = sqlite3.connect(tmp_path / "rows.db")
    for published, _ in one_by_one(tmp_path / "published"):
        take_over(published, store)
    state = read_contents(tmp_path / "checkpoints" / "step=12.ckpt").checkpoint["state_dict"]
    for name in NUM_ROWS:
        path = f"bags.embedding_bags.{name}"
        rows = _full(state[f"{path}.weight"])
        stored = dict(
            store.execute("SELECT id, value FROM rows WHERE name = ?", (f"{path}.weight",))
        )
        if name != "mapped":
            assert stored == {row: values.numpy().tobytes() for row, values in enumerate(rows)}
            continue
        numbers = torch.tensor([*stored])
        row_of_id = {
            int(kept): row for row, kept in enumerate(_full(state[f"{path}.ids"]).view(-1))
        }
        expected = {}
        for number, kept in zip(numbers.tolist(), mixed(numbers).tolist(), strict=True):
            expected[number] = rows[row_of_id[kept]].numpy().tobytes()
        assert stored == expected
        assert len(stored) == int((_full(state[f"{path}.ids"]) >= 0).sum())


def _full(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value.read()


def test_a_server_follows_columns(tmp_path: Path) -> None:
    """Started of an untrained module before there is a publication, it takes them over while it
    answers."""
    file = write_clicks(tmp_path / "data")
    data = click_data(file, predict=file)
    publish = PublishRows(str(tmp_path / "new"), every_n_steps=10)
    options = {**DEFAULTS, "max_steps": 20, "devices": 1, "strategy": "torchrec_sharded"}
    trainer = pl.Trainer(callbacks=[publish], **options)
    module = ColumnModel()
    trainer.fit(module, data)
    raw = RawRows(mapping=data.columns.to_plain(), rows=data.raw_rows())
    batch = data.columns({name: [row[name] for row in raw.rows] for name in raw.rows[0]})
    manifests = sorted(file.name for file in (tmp_path / "new").glob("manifest-*"))
    assert manifests == ["manifest-00000001.json", "manifest-00000002.json"], "rows are sent again"
    served = tmp_path / "served"
    export_for_serving(ColumnModel(), batch, served, raw=raw)
    published = tmp_path / "published"
    published.mkdir()
    with running_app(served, "--follow", str(published), absent=("lightning_distrec",)) as app:
        assert app.ask(content=raw.rows).step is None
        shutil.copytree(tmp_path / "new", published, dirs_exist_ok=True)
        answers: dict[str | None, set[str]] = {}
        deadline = time.monotonic() + WAIT_SECONDS
        newest = 0
        while newest < NUM_NEWEST and time.monotonic() < deadline:
            answered = app.ask(content=raw.rows)
            answers.setdefault(answered.step, set()).add(json.dumps(answered.content))
            newest += answered.step == "20"
    # Both workers have followed, and a step has one answer.
    assert newest == NUM_NEWEST
    assert [len(texts) for texts in answers.values()] == [1] * len(answers)
    scores = torch.tensor(json.loads(answers["20"].pop()))
    trained = trainer.strategy.unshard().eval()
    with torch.no_grad():
        assert torch.equal(scores, trained.predict_step(batch, 0))
    manifest = json.loads((published / "manifest-00000002.json").read_text())
    history = manifest["tables"]["tables.embedding_bags.history.weight"]
    assert history["id"] == "vocabulary"
    (changed,) = history["changed"]
    rows = parquet.read_table(published / changed["file"])
    vocabulary = data.columns.to_plain()["vocabularies"]["history"]
    values = [
        vocabulary[row - 1] if 0 < row <= len(vocabulary) else None
        for row in rows["row"].to_pylist()
    ]
    assert rows["id"].to_pylist() == values


def test_publishes_by_the_clock(tmp_path: Path) -> None:
    """Two ranks whose steps take 50 ms or more publish every 0.3 s, at the same steps."""
    begin = time.monotonic()
    options = {"every_n_steps": None, "every_seconds": 0.3}
    job = ("tables", "Adagrad", None, (SlowSteps(),))
    run_on_warm_ranks(train_and_publish, 2, str(tmp_path), 20, options, *job)
    steps = [manifest["step"] for _, manifest in one_by_one(tmp_path / "published")]
    assert steps[-1] == 20
    assert 2 <= len(steps) <= (time.monotonic() - begin) / 0.3 + 1


class SlowSteps(pl.Callback):
    """Lets a step take 50 ms or more."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.05)
