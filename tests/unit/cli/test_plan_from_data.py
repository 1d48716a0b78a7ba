"""`plan --from-data`: what batches look up is counted, planned by, saved beside the plan and shown
on its page."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from tests.support.command import run_command, write_config

HERE = "tests.unit.cli.test_plan_from_data."
BATCH, BATCHES = 32, 5


def drawn(number: int) -> dict[str, list[list[int]]]:
    """Return the bags of a batch, by feature: one id in two of `a` and all of `b` are of hot
    rows."""
    draw = np.random.default_rng(number)
    bags_a = [draw.choice([7, int(draw.integers(100_000))], size=4).tolist() for _ in range(BATCH)]
    return {"a": bags_a, "b": [[3]] * BATCH}


class Data(pl.LightningDataModule):
    """Batches that are drawn from their number."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails, self.ready = fails, False

    def setup(self, stage: str) -> None:
        self.ready = stage == "fit"

    def train_dataloader(self) -> DataLoader:
        if self.fails or not self.ready:
            raise FileNotFoundError("clicks.parquet")
        batches = [
            {
                "ids": KeyedJaggedTensor(
                    keys=list(bags),
                    values=torch.tensor([
                        i for entry in bags.values() for bag in entry for i in bag
                    ]),
                    lengths=torch.tensor([len(bag) for entry in bags.values() for bag in entry]),
                ),
                "label": torch.ones(BATCH),
            }
            for bags in map(drawn, range(BATCHES))
        ]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


class Clicks(pl.LightningModule):
    """Two tables, of which the batches show the features, and one of which they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name="many", num_embeddings=200_000, embedding_dim=16, feature_names=["a"]
                ),
                EmbeddingBagConfig(
                    name="few", num_embeddings=5_000, embedding_dim=16, feature_names=["b"]
                ),
                EmbeddingBagConfig(
                    name="unseen", num_embeddings=5_000, embedding_dim=16, feature_names=["c"]
                ),
            ]
        )
        self.layer = nn.Linear(48, 1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        return self.layer(self.bags(batch["ids"]).values()).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def run(capsys: pytest.CaptureFixture[str], *args: str, **data: Any) -> tuple[int, str, str]:
    trainer = {"accelerator": "cpu", "devices": 2, "strategy": "torchrec_sharded"}
    write_config(HERE + "Clicks", HERE + "Data", trainer, **data)
    return run_command(capsys, "plan", "--config", "job.yaml", "--quick", *args)


def test_a_plan_follows_what_its_batches_look_up(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, text, _ = run(
        capsys, "--from-data", "3", "--save-plan", "plan.json", "--html", "plan.html", "--json"
    )
    actual = json.loads(text)
    assert code == 0
    assert actual["planned_with"][0] == ["examples per rank", str(BATCH), "of the first batch"]
    assert any(
        "no batch holds the features of bags.unseen by name" in line for line in actual["assumed"]
    )
    assert any(
        "one id per example and feature is assumed for 1 table without" in line
        for line in actual["assumed"]
    )
    assert "ids per example" in Path("plan.html").read_text()


def test_data_is_read_only_where_that_is_asked_for_and_a_failure_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(capsys, fails=True)[0] == 0
    code, _, error = run(capsys, "--from-data", "2", fails=True)
    assert code == 2
    assert "--from-data: the data cannot be read (FileNotFoundError: clicks.parquet)" in " ".join(
        error.split()
    )
    code, _, error = run(capsys, "--from-data", "0")
    assert code == 2
    assert "--from-data 0: must be at least 1" in error
