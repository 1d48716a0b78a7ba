"""The batch size that plans are made for is the job's own, where it can be known without running a
hook once more."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from lightning_distrec import TorchRecShardedStrategy
from lightning_distrec.strategies.tables.set_up_inputs import with_batch_size
from tests.support.trainers import DEFAULTS

EXAMPLES = torch.ones(12, 3)


class Looks(pl.LightningModule):
    """Asks for the batch size when set-up would."""

    def __init__(self, **hparams: Any) -> None:
        super().__init__()
        self.save_hyperparameters(hparams)
        self.layer = nn.Linear(3, 1)

    def setup(self, stage: str) -> None:
        settings = TorchRecShardedStrategy().table_settings
        self.seen = with_batch_size(settings, self.trainer, self).batch_size_in_words[1:]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(pl.LightningDataModule):
    """Makes its loader when it is asked for it, and counts how often."""

    def __init__(self, batch_size: Any) -> None:
        super().__init__()
        self.batch_size, self.num_requests = batch_size, 0

    def train_dataloader(self) -> DataLoader:
        self.num_requests += 1
        return DataLoader(EXAMPLES, batch_size=6)  # type: ignore[arg-type]


def fit(model: Looks, **data: Any) -> Looks:
    pl.Trainer(**DEFAULTS, max_steps=1).fit(model, **data)
    return model


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(EXAMPLES, batch_size=4),  # type: ignore[arg-type]
        DataLoader(EXAMPLES, batch_sampler=BatchSampler(SequentialSampler(EXAMPLES), 4, False)),  # type: ignore[arg-type]
        {"a": [DataLoader(EXAMPLES, batch_size=4)]},  # type: ignore[arg-type]
    ],
)
def test_a_loader_that_fit_is_given_says_it(loader: Any) -> None:
    if isinstance(loader, dict):
        loader = pl.utilities.CombinedLoader(loader)  # type: ignore[attr-defined]
        model = Looks()
        model.training_step = lambda batch, batch_idx: model.layer(batch["a"][0]).sum()  # type: ignore[method-assign]
    else:
        model = Looks()
    assert fit(model, train_dataloaders=loader).seen == ("4", "of the loader")


def test_attributes_say_it_where_a_hook_makes_the_loader_and_no_hook_runs_once_more() -> None:
    origin = "batch_size of the data or the module"
    data = Data(6)
    assert fit(Looks(), datamodule=data).seen == ("6", origin)
    assert data.num_requests == 1
    # the data's is no number
    assert fit(Looks(batch_size=8), datamodule=Data(None)).seen == ("512", "assumed")
    assert fit(
        Looks(batch_size=8), train_dataloaders=DataLoader(EXAMPLES, batch_size=None)
    ).seen == ("8", origin)  # type: ignore[arg-type]
