"""What LightningCLI takes beside our strategies, whose modules import torchrec."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torchrec.optim
from lightning.pytorch.cli import LightningCLI
from torch import nn

from lightning_distrec._compat import jsonargparse as _jsonargparse
from lightning_distrec.registration import class_path


class Layer(pl.LightningModule):
    """One layer, whose optimizer the command line names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)


@pytest.mark.parametrize("name", ["Adam", "Adagrad", "SGD"])
def test_prefer_torchs_names_takes_an_optimizer_by_its_name(name: str) -> None:
    _jsonargparse.prefer_torchs_names()  # a second time changes nothing
    strategy = [
        "--trainer.strategy=lightning_distrec.TorchRecShardedStrategy",
        "--trainer.strategy.min_rows=100",
    ]
    quiet = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    cli = LightningCLI(
        Layer, run=False, args=[f"--optimizer={name}", "--optimizer.lr=0.5", *strategy, *quiet]
    )
    assert issubclass(getattr(torchrec.optim, name), torch.optim.Optimizer), (
        "else this test shows nothing"
    )
    assert cli.config["optimizer"]["class_path"] == f"torch.optim.{name}"


@pytest.mark.parametrize("in_file", [True, False])
def test_take_names_of_strategies_lets_options_follow_a_name(tmp_path: Path, in_file: bool) -> None:
    _jsonargparse.take_names_of_strategies(class_path)
    config = tmp_path / "job.yaml"
    config.write_text("trainer: {strategy: torchrec_sharded}")
    name = [f"--config={config}"] if in_file else ["--trainer.strategy", "torchrec_sharded"]
    option = ["--trainer.strategy.init_args.min_rows", "10"]
    quiet = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    cli = LightningCLI(Layer, run=False, args=[*name, *option, *quiet])
    assert cli.config["trainer.strategy"].class_path.endswith(".TorchRecShardedStrategy")
    assert cli.config["trainer.strategy"].init_args.min_rows == 10
    plain = LightningCLI(Layer, run=False, args=[*name, *quiet])
    assert plain.config["trainer.strategy"] == "torchrec_sharded"
