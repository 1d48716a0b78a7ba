"""Modules and data with plain arguments, as a YAML names them; all jobs train on the same global
batches."""

from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support import mapped_models
from tests.support.click_model import ClickModel, join_batches, make_batch, seeded
from tests.support.mapped_models import DynamicModel, MchModel
from tests.support.plain_loop import OPTIMIZERS
from tests.support.weighted_models import PositionWeighted

STEPS = 4
OF = 12
"""Each step has the batches of this number of ranks, however many ranks train."""


class Dynamic(DynamicModel):
    """Has ordinary tables, which get ids of any range by the strategy's options."""

    def __init__(self) -> None:
        seeded(super().__init__)


class Mch(MchModel):
    """Has managed collision modules of torchrec."""

    def __init__(self) -> None:
        seeded(super().__init__)


class Weighted(PositionWeighted):
    """Has a feature processor of torchrec around its tables."""

    def __init__(self) -> None:
        seeded(super().__init__, *OPTIMIZERS["Adagrad"])


class Clicks(ClickModel):
    """Has tables of three types."""

    def __init__(self) -> None:
        seeded(super().__init__, *OPTIMIZERS["Adagrad"])


class Batches(pl.LightningDataModule):
    """Gives each rank its share of the global batches, other ones in each epoch."""

    def __init__(self, mapped: bool = False) -> None:
        super().__init__()
        self.mapped = mapped

    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        rank, num_ranks, epoch = (
            self.trainer.global_rank,
            self.trainer.world_size,
            self.trainer.current_epoch,
        )
        share = range(rank * OF // num_ranks, (rank + 1) * OF // num_ranks)
        steps = range(STEPS * epoch, STEPS * (epoch + 1))
        return DataLoader([batch_of(self.mapped, step, share) for step in steps], batch_size=None)


def batch_of(mapped: bool, step: int, share: range = range(OF)) -> dict[str, Tensor]:
    """Return the part of a step's global batch that the ranks of `share` have."""
    if mapped:
        return mapped_models.joined([mapped_models.make_batch(100 * step + rank) for rank in share])
    return join_batches([make_batch(1000 * step + rank, 4) for rank in share])
