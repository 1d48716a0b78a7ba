"""A dry run of a YAML says what a fit of the same YAML does: the same plan, the same bytes."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_distrec import Communication
from lightning_distrec.cli import main as cli
from lightning_distrec.cli.main import main
from lightning_distrec.sharding.planning.plan_file import load_plan, plan_text
from tests.multiprocess.sharding.test_traffic import (
    BAGS,
    EXAMPLES,
    FEATURES,
    STEPS,
    _batch,
)
from tests.support.advised_models import NUM_USERS, Advised
from tests.support.ranks import run_each_on_ranks

MEMORY = 64 * 2**20
"""Of a rank, so little that plans go by it."""


class EvenIds(pl.LightningDataModule):
    """Batches in which every row of every table is looked up once."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader([_batch()] * STEPS, batch_size=None)


class Users(Advised):
    """Plain tables of many rows and few, under an optimizer that says how much is kept beside
    them."""

    def __init__(self, optimizer: str = "AdamW") -> None:
        super().__init__(optimizer)
        self.users = nn.Embedding(NUM_USERS, 32)
        self.items = nn.EmbeddingBag(3 * NUM_USERS, 8, mode="sum")
        self.days = nn.Embedding(366, 32)
        self.layer = nn.Linear(32 + 8 + 32, 1)

    def forward(self, batch: Tensor) -> Tensor:
        return self.layer(
            torch.cat(
                [self.users(batch[:, 0]), self.items(batch), self.days(batch[:, 1] % 366)], dim=1
            )
        )


class KeepsWhatIsTold(Communication):
    """Writes, on rank 0, what was sent in a step and what was estimated at the start, beside the
    plan."""

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_fit_end(trainer, pl_module)
        if trainer.is_global_zero:
            torch.save(self.bytes_per_step, f"{trainer.loggers[0].log_dir}/sent.pt")


def _config(
    folder: Path, model: dict[str, Any], data: str, strategy: dict[str, Any], **trainer: Any
) -> Path:
    logger = {
        "class_path": "lightning.pytorch.loggers.CSVLogger",
        "init_args": {"save_dir": str(folder), "name": "run"},
    }
    config = {
        "model": model,
        "data": {"class_path": data},
        "trainer": {
            "accelerator": "cpu",
            "devices": 2,
            "max_steps": STEPS,
            "logger": logger,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "use_distributed_sampler": False,
            "callbacks": [{"class_path": f"{__name__}.KeepsWhatIsTold"}],
            "strategy": {
                "class_path": "lightning_distrec.TorchRecShardedStrategy",
                "init_args": strategy,
            },
        }
        | trainer,
    }
    folder.mkdir()
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def _jobs(folder: Path) -> dict[str, Path]:
    """Return name -> the YAML of a job."""
    planning = {"reserve": "20%", "bandwidths": {"intra_node": "2GB/s", "host_memory": "7GB/s"}}
    cuts = {
        "wide": "table_wise",
        "long": "row_wise",
        "both": "column_wise",
        "two": "row_wise",
        "last": "table_wise",
    }
    factors = {name: {"pooling_factor": FEATURES[BAGS[name][0][0]][0]} for name in cuts}
    tables = {
        f"bags.{name}": {"sharding_types": [cut], "min_partition": 4} | factors[name]
        for name, cut in cuts.items()
    }
    for name in ("wide", "two"):
        tables[f"rows.of_{name}"] = {"sharding_types": ["row_wise"]} | factors[name]
    even = {
        "tables": tables,
        "batch_size_per_rank": EXAMPLES,
        "memory_bytes_per_rank": MEMORY,
        "prefetch": {"depth": 1},
    }
    lookups = {
        "class_path": "tests.multiprocess.sharding.test_traffic.Lookups",
        "init_args": {"weighted": True},
    }
    few = {"memory_bytes_per_rank": 2 * MEMORY, "planning": planning, "convert_embeddings": "all"}
    return {
        "lookups": _config(folder / "lookups", lookups, f"{__name__}.EvenIds", even),
        "users": _config(
            folder / "users",
            {"class_path": f"{__name__}.Users"},
            "tests.support.advised_models.Ids",
            few,
            accumulate_grad_batches=2,
        ),
    }


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each job's YAML, after two ranks have trained it, each with its plan and what was sent beside
    it."""
    jobs = _jobs(tmp_path_factory.mktemp("jobs"))
    fits = {name: (main, ["fit", "--debug", "--config", str(file)]) for name, file in jobs.items()}
    run_each_on_ranks(fits, 2)
    return jobs


def _dry(file: Path, capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    capsys.readouterr()
    code = cli.main(["plan", "--config", str(file), "--json", "--quick", *args])
    actual: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if actual["fits"] else 1)
    return actual


def test_the_plan_is_that_of_a_fit_of_the_same_yaml(
    fitted: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, num_tables in (("lookups", 7), ("users", 3)):
        file = fitted[name]
        assert _dry(file, capsys, "--save-plan", str(tmp_path / "plan.json"))["fits"]
        real, dry = load_plan(file.parent / "run" / "version_0"), load_plan(tmp_path / "plan.json")
        assert plan_text(real) == plan_text(dry)
        assert len(real.tables) == num_tables
