"""One contract for every private name of lightning's own loaders of checkpoints."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_distrec._compat import lightning_checkpoints as _lightning_checkpoints
from tests.support.checkpoint_folders import by_rows, write_folder


class Layer(pl.LightningModule):
    """One layer, built from a hyperparameter."""

    def __init__(self, dim: int = 2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(dim, 1)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("first", self.layer.weight[0, 0])


def test_lightning_reads_a_folder_wherever_it_reads_a_file(tmp_path: Path) -> None:
    assert callable(_lightning_checkpoints.read_folders_too), (
        "which importing lightning_distrec has called"
    )
    trained = Layer(3)
    state = {name: by_rows(tensor) for name, tensor in trained.state_dict().items()}
    path = write_folder(
        tmp_path / "it.ckpt", {"loops": None, "state_dict": state, "hyper_parameters": {"dim": 3}}
    )
    for map_location in (None, "cpu"):
        loaded = Layer.load_from_checkpoint(path, map_location=map_location)
        assert all(
            torch.equal(value, trained.state_dict()[name])
            for name, value in loaded.state_dict().items()
        )
    stock = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    actual = stock.test(Layer(3), torch.utils.data.DataLoader([0]), ckpt_path=path, verbose=False)
    assert actual[0]["first"] == trained.layer.weight[0, 0].item()
