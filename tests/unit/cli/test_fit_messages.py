"""What `fit` and its like print about a mistake: one block, which names the key."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lightning_distrec.cli import fit_cli, main

MODULE = """
import torch
from lightning import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Model(LightningModule):
    def __init__(self, dim: int = 8, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.table, self.layer, self.lr = nn.Embedding(100, dim), nn.Linear(dim, 1), lr

    def forward(self, ids):
        return self.layer(self.table(ids)).squeeze(1)

    def training_step(self, batch, batch_idx):
        return nn.functional.binary_cross_entropy_with_logits(self(batch["id"]), batch["click"])

    def predict_step(self, batch, batch_idx):
        return self(batch["id"])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)

class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader([{"id": i, "click": float(i % 2)} for i in range(33)], batch_size=4)

    predict_dataloader = train_dataloader
"""
JOB = """
model: {class_path: clicks_job.Model}
data: {class_path: clicks_job.Data}
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 1
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  strategy: torchrec_sharded
"""

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Run]:
    """Return a function that runs the script in a folder with a job; it returns exit code and
    stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("clicks_job.py").write_text(MODULE)
    Path("job.yaml").write_text(JOB)

    def run_script(*args: str) -> tuple[int, str]:
        capfd.readouterr()
        return main.main(args), capfd.readouterr().err

    yield run_script
    sys.modules.pop("clicks_job", None)


STRATEGY = "--trainer.strategy.init_args"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--trainr.max_epochs 3", "unrecognized arguments: --trainr.max_epochs 3"),
        ("--config jb.yaml", 'Parser key "config": File does not exist: '),
        ("--ckpt_path clicks_jb.py", "ckpt_path clicks_jb.py: there is no such file or folder."),
        ("--trainer.strategy torchrec_shard", "'torchrec_shard'; did you mean 'torchrec_sharded'"),
        (f"{STRATEGY}.check_ids errr", "TorchRecShardedStrategy':\n        Parser key \"check_ids\":"),
        (f"{STRATEGY}.min_row 3", "Option 'min_row' is not accepted"),
        (f"{STRATEGY}.prefetch {{depth:0}}", "prefetch: depth=0 must be a whole number of"),
        (f"{STRATEGY}.batch_size_per_rank=-1", "batch_size_per_rank=-1: must be above 0."),
        ("--trainer.num_nodes 0", "`num_nodes` must be a positive integer, but got 0."),
        ("--trainer.max_epochs many", 'Parser key "trainer.max_epochs":'),
        ("--model.class_path clicks_job.Modl", "module 'clicks_job' has no attribute 'Modl'"),
        ("--model.class_path click_job.Model", "No module named 'click_job'"),
        ("--trainer.callbacks [{class_path:lightning_distrec.Throughputt}]", "'Throughputt'"),
    ],
)  # fmt: skip
def test_a_mistake_on_the_command_line_is_one_block(run: Run, args: str, message: str) -> None:
    _check_block(run, message, *args.replace(":", ": ").split(" ", 1))


def _check_block(run: Run, message: str, *args: str) -> None:
    code, error = run("fit", "--config", "job.yaml", *args)
    assert code == 2
    assert message in error.partition("lightning-distrec: ")[2]
    assert error.count("lightning-distrec: ") == 1
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_epochs", "max_epoch", "Subcommand 'fit' does not accept option 'trainer.max_epoch'"),
        ("max_epochs: 1", "max_epochs: -5", "`max_epochs` must be a non-negative integer or -1"),
        ("model: {", "model: }", "Problems parsing config: "),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_is_one_block(run: Run, old: str, new: str, message: str) -> None:
    Path("job.yaml").write_text(JOB.replace(old, new))
    _check_block(run, message)


def test_a_module_whose_package_is_missing_names_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("clicks_job.py").write_text(f"import pyarrow\n{MODULE}")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, error = run("fit", "--config", "job.yaml")
    assert code == 2
    assert "Problem with given class_path 'clicks_job.Model':" in error
    assert "import of pyarrow halted" in error


def test_of_the_ranks_of_a_node_one_prints_the_mistake(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit_cli, "SECONDS_FOR_PRINTING", 0.0)
    printed = []
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        code, error = run("fit", "--config", "none.yaml")
        assert code == 2
        printed.append(error.count("lightning-distrec: "))
    assert printed == [1, 0]


def test_what_a_command_line_sets_wins_over_a_checkpoint_be_it_a_file_or_a_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(fit_cli, "rank_zero_info", said.append)
    job = ("fit", "--config", "job.yaml")
    first = (*job, "--model.init_args.dim=4", "--model.init_args.lr=0.25")
    assert run(*first)[0] == 0
    (file,) = tmp_path.glob("checkpoints/*.ckpt")
    distributed = f"{STRATEGY}.checkpoint={{distributed: true}}"
    assert run(*first, distributed, "--trainer.default_root_dir=other")[0] == 0
    (folder,) = tmp_path.glob("other/checkpoints/*.ckpt")
    assert (file.is_file(), folder.is_dir()) == (True, True)
    for checkpoint in (file, folder):
        said.clear()
        more = (
            "--ckpt_path",
            str(checkpoint),
            "--model.init_args.lr=0.5",
            "--trainer.max_epochs=2",
        )
        assert run(*job, *more, f"--trainer.default_root_dir={checkpoint.name}")[0] == 0
        assert said == [
            f"From {checkpoint}, as the command line does not set them: model.dim=4.",
            f"Set here, and different in {checkpoint}: model.lr=0.5 (there 0.25).",
        ]
        config = Path(checkpoint.name, "config.yaml").read_text()
        assert "lr: 0.5" in config
        assert "dim: 4" in config


def test_predictions_are_one_file_in_the_order_of_the_data(run: Run) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    predict = ("predict", "--config", "job.yaml")
    out = ("--out", "predictions.parquet", "--columns")
    code, error = run(*predict, *out, "id,click")
    assert code == 0, error
    table = parquet.read_table("predictions.parquet").to_pydict()
    assert table["index"] == table["id"] == list(range(33))
    assert table["click"] == [float(i % 2) for i in range(33)]
    assert len(set(table["prediction"])) == 33
    assert not Path("predictions.parquet.parts").exists()
    for args, message in (
        (("--columns", "id"), "predict: --columns is for --out FILE.parquet."),
        (("--out", "p.csv"), "are written as Parquet, and 'p.csv' is not named *.parquet."),
        ((*out, "clik"), "there is no 'clik' in a dict of id, click; did you mean 'click'?"),
    ):
        code, error = run(*predict, *args)
        assert code == 2
        assert message in error
