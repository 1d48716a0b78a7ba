"""Vectors, weights, values by key and times in a zone, trained on ranks and served."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from pyarrow import parquet

from lightning_distrec.cli.main import main
from tests.support.kind_models import FEATURES, KindModel, kind_data, write_rows
from tests.support.ranks import run_on_warm_ranks
from tests.support.served_folder import ask
from tests.support.trainers import make_trainer

NUM_ROWS = 120


def fit(folder: Path) -> list[float]:
    """Train all rows in each step, on two ranks; save, and return this rank's predictions."""
    model = KindModel()
    data = kind_data(str(folder / "rows.parquet"), NUM_ROWS // 2, num_workers=1)
    trainer = make_trainer(max_epochs=3)
    trainer.fit(model, data)
    trainer.save_checkpoint(folder / "rows.ckpt")
    return torch.cat(trainer.predict(model, data)).tolist()


@pytest.mark.slow
def test_ranks_train_and_a_folder_answers_as_one_process_does(tmp_path: Path) -> None:
    file = write_rows(tmp_path, NUM_ROWS)
    on_ranks = run_on_warm_ranks(fit, 2, tmp_path)
    model, data = KindModel(), kind_data(file, NUM_ROWS)
    data.setup()
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    optimizer = model.configure_optimizers()
    for epoch in range(3):
        loader = data.train_dataloader()
        loader.sampler.set_epoch(epoch)
        (batch,) = loader
        assert batch["weighted"].weights().std() > 0.1
        optimizer.zero_grad()
        model.training_step(batch, 0).backward()
        optimizer.step()
    assert all((weight != start[name]).any() for name, weight in model.state_dict().items())
    (batch,) = data.predict_dataloader()
    expected = model.predict_step(batch, 0).tolist()
    assert [*on_ranks[0], *on_ranks[1]] == pytest.approx(expected, abs=1e-5)

    init_args = {"train": file, "features": FEATURES, "label": "y", "batch_size": NUM_ROWS}
    init_args["cache_dir"] = str(tmp_path / "cache")
    job = {
        "model": {"class_path": "tests.support.kind_models.KindModel"},
        "data": {"class_path": "lightning_distrec.data.ColumnData", "init_args": init_args},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    arguments = ["--format", "torch.export", "--config", str(tmp_path / "job.yaml")]
    assert main(["export", str(tmp_path / "rows.ckpt"), str(tmp_path / "served"), *arguments]) == 0
    rows = []
    for row in parquet.read_table(file).drop_columns("y").to_pylist():
        maps = {name: dict(row[name]) for name in ("tastes", "prices")}
        rows.append({**row, **maps, "at": row["at"].isoformat()})
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    answers = json.loads(ask(tmp_path / "served", ["../rows.json"])[0])
    assert answers == pytest.approx(expected, abs=1e-5)
