"""Runs whose hooks all draw random numbers, from all generators: data, splits and noise."""

import random
import secrets
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import numpy
import torch
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, random_split

from tests.support.ranks import rank_and_num_ranks
from tests.support.trainers import DEFAULTS

WIDTH, NUM_SAMPLES = 4, 80
Sample = tuple[int, Tensor]


def draw() -> float:
    """Return a number that depends on all three generators."""
    return float(torch.rand(())) + random.random() + float(numpy.random.rand())


class Numbered(Dataset[Sample]):
    """Samples with their numbers."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Sample:
        return index, torch.sin(torch.arange(WIDTH) * (1.0 + index))


class Stream(IterableDataset[Sample]):
    """The same, in an order that is drawn when the stream begins; every rank reads some."""

    def __init__(self, rank: int, num_replicas: int) -> None:
        self.rank, self.num_replicas = rank, num_replicas

    def __iter__(self) -> Iterator[Sample]:
        for index in torch.randperm(NUM_SAMPLES).tolist()[self.rank :: self.num_replicas]:
            yield Numbered()[index]


class Drawing(pl.LightningDataModule):
    """Draws in each of its hooks."""

    def __init__(self, loader: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.loader = {"batch_size": 4, "shuffle": True} | (loader or {})
        self.made: list[str] = []

    def setup(self, stage: str) -> None:
        self.samples, self.left_out = random_split(Numbered(), [64, 16])  # type: Any, Any

    def train_dataloader(self) -> Any:
        self.made.append("train")
        return DataLoader(random_split(self.samples, [40, 24])[0], **self.loader)

    def val_dataloader(self) -> Any:
        self.made.append("val")
        return DataLoader(random_split(self.left_out, [8, 8])[0], batch_size=2)


class Splitting(Drawing):
    """Draws in the hooks that make loaders alone."""

    def setup(self, stage: str) -> None:
        self.samples, self.left_out = (
            Subset(Numbered(), range(64)),
            Subset(Numbered(), range(64, 80)),
        )


class Streaming(Drawing):
    """Reads a stream."""

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(**self.trainer.distributed_sampler_kwargs), batch_size=4)


class Noisy(pl.LightningModule):
    """A chain of blocks; remembers what it saw in each step, and what it drew in each hook before
    and in it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(WIDTH, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)
        )
        self.seen: list[Any] = []
        self.noise: dict[str, float] = {}

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)

    def on_fit_start(self) -> None:
        self.noise["fit"] = draw()

    def on_train_start(self) -> None:
        self.noise["train"] = draw()

    def on_train_epoch_start(self) -> None:
        self.seen.append(("epoch", draw()))

    def on_validation_start(self) -> None:
        self.noise["validation"] = draw()

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        loss = (self(batch[1] + draw()) ** 2).mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Sample, batch_idx: int) -> None:
        loss = float(self.trainer.callback_metrics["loss"])
        self.seen.append((
            "train",
            torch.as_tensor(batch[0]).tolist(),
            loss,
            self.noise["fit"],
            self.noise["train"],
        ))

    def validation_step(self, batch: Sample, batch_idx: int) -> None:
        self.log("val_loss", self(batch[1]).mean(), sync_dist=True)
        if not self.trainer.sanity_checking:
            self.seen.append(("val", torch.as_tensor(batch[0]).tolist(), self.noise["validation"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class WithTable(Noisy):
    """And a table, by which samples are scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NUM_SAMPLES, 8)

    def training_step(self, batch: Sample, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + (self.table(torch.as_tensor(batch[0])) ** 2).mean()


class SavesAt(Checkpoint):
    """Saves once, at a hook, when so many batches were trained."""

    def __init__(self, path: str, hook: str, num_batches: int) -> None:
        self.path, self.hook, self.num_batches = path, hook, num_batches
        self.num_seen = 0
        """What the module had seen by then."""

    def _save(self, trainer: pl.Trainer, module: Any, hook: str) -> None:
        is_due = trainer.fit_loop.epoch_loop.batch_progress.total.processed >= self.num_batches
        if hook == self.hook and is_due and not self.num_seen:
            trainer.save_checkpoint(self.path)
            # The module's hook, which notes the batch, comes after the callback's.
            self.num_seen = len(module.seen) + (hook == "batch")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self._save(trainer, pl_module, "batch")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._save(trainer, pl_module, "epoch")


def fit(
    strategy: Any,
    data: pl.LightningDataModule,
    saves: SavesAt | None = None,
    ckpt_path: str | None = None,
    kind: type[Noisy] = Noisy,
    seed: int | None = 5,
    **settings: Any,
) -> Noisy:
    """Train with a seed, or none; saves: on the way. settings: of the Trainer; its callbacks are made
    by a function."""
    if seed is None:
        torch.manual_seed(secrets.randbits(31))
    else:
        pl.seed_everything(seed)
    module = kind()
    settings = (
        DEFAULTS
        | {"max_epochs": 4, "use_distributed_sampler": True, "num_sanity_val_steps": 2}
        | settings
    )
    settings["enable_checkpointing"] = saves is not None
    callbacks = settings.pop("callbacks", list)()
    trainer = pl.Trainer(
        strategy=strategy,
        devices=rank_and_num_ranks()[1],
        callbacks=[*callbacks, saves] if saves else callbacks,
        **settings,
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module
