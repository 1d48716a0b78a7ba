"""A model that keeps a diary of what reaches its steps and callbacks, its batches, and loaders of
all kinds."""

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from lightning_distrec._compat.torch import without_torch_function
from tests.support.click_model import FEATURES, bag_configs, join_batches, make_batch
from tests.support.embedding_models import whole_state
from tests.support.ranks import rank_and_num_ranks

Batch = dict[str, Tensor]


def named_batch(number: int, size: int = 4, rank: int | None = None) -> Batch:
    """Return the batch of this number on one rank; "name" tells which it is."""
    rank = rank_and_num_ranks()[0] if rank is None else rank
    batch = make_batch(1000 * number + rank, size)
    draw = torch.Generator().manual_seed(number)
    single = torch.randint(0, 40, (size,), generator=draw)
    return batch | {"name": torch.full((size,), 1000 * rank + number), "single": single}


def names_in(batch: Any) -> Any:
    """Return which batches these are, of any structure of them."""
    if isinstance(batch, dict) and "name" in batch:
        return batch["name"].tolist()
    if isinstance(batch, dict):
        return {key: names_in(value) for key, value in batch.items()}
    return type(batch).__name__


class Watched(pl.LightningModule):
    """Looks up bags and an nn.Embedding, has all four steps, and writes down what they get."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.ebc = EmbeddingBagCollection(tables=bag_configs())
        self.embedding = nn.Embedding(40, 8)
        self.mlp = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 1))
        self.diary: list[Any] = []
        self.final_state: dict[str, Tensor] = {}
        self.ahead: dict[str, int] = {}

    def look_up(self, batch: Batch) -> Tensor:
        """Return the columns of all tables."""
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        return torch.cat([self.ebc(features).values(), self.embedding(batch["single"])], 1)

    def forward(self, batch: Batch) -> Tensor:
        return self.mlp(self.look_up(batch)).squeeze(-1)

    def loss_of(self, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        return nn.functional.binary_cross_entropy_with_logits(self(batch), batch["label"])

    def note(self, event: str, *values: Any) -> None:
        """Write a line."""
        self.diary.append((event, *values))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = self.loss_of(batch)
        self.note("training", names_in(batch), batch_idx, float(loss.detach()))
        self.log(
            "loss",
            loss,
            on_step=True,
            on_epoch=True,
            sync_dist=True,
            batch_size=len(batch["label"]),
        )
        return loss

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = self.loss_of(batch)
        self.note("validation", names_in(batch), batch_idx, dataloader_idx, float(loss))
        self.log("val_loss", loss, sync_dist=True, batch_size=len(batch["label"]))

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.note("prediction", names_in(batch), batch_idx, dataloader_idx)
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def on_train_end(self) -> None:
        self.final_state = whole_state(self)
        self.on_validation_end()

    def on_validation_end(self) -> None:
        counts = self.trainer.strategy.lookups_ahead
        self.ahead |= {kind: count.ahead for kind, count in counts.items()}

    on_test_end = on_predict_end = on_validation_end


def _noting(event: str) -> Any:
    def hook(self: Any, trainer: pl.Trainer, module: Any, *values: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        progress, validation = loop.batch_progress, loop.val_loop.batch_progress
        batches = [names_in(value) if isinstance(value, dict) else value for value in values]
        counts = trainer.global_step, trainer.current_epoch
        counts += progress.current.ready, progress.current.completed
        module.note(event, *batches, *counts, trainer.is_last_batch, validation.is_last_batch)

    return hook


class Diarist(pl.Callback):
    """Writes into the model's diary what callbacks see."""

    on_train_epoch_start = _noting("epoch starts")
    on_train_epoch_end = _noting("epoch ends")
    on_train_batch_start = _noting("batch starts")
    on_train_batch_end = _noting("batch ends")
    on_validation_start = _noting("validation starts")
    on_validation_end = _noting("validation ends")
    on_validation_batch_end = _noting("validation batch ends")

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        with without_torch_function():  # this rank's shards, as plain tensors
            weights = [weight.detach().clone() for weight in module.parameters()]
        module.note("exception", trainer.global_step, weights)


class Written(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Any] = []

    name = "written"
    version = 0

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Keep a line."""
        self.lines.append((step, dict(metrics)))


# -- loaders; each gives the batches `first`, `first + 1`, ... of its rank


class Numbered(Dataset):
    """Batches by their number. fails_at: the batch at which its disk is gone."""

    def __init__(
        self, steps: int, first: int = 0, fails_at: int | None = None, size: int = 4
    ) -> None:
        self.steps, self.first, self.fails_at, self.size = steps, first, fails_at, size
        self.rank = rank_and_num_ranks()[0]

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, number: int) -> Batch:
        if number >= self.steps:
            raise IndexError(number)
        if number == self.fails_at:
            raise OSError("the disk went away")
        return named_batch(self.first + number, self.size, self.rank)


class Stream(IterableDataset):
    """The same without a length."""

    def __init__(self, *args: Any) -> None:
        self.batches = Numbered(*args)

    def __iter__(self) -> Iterator[Batch]:
        for number in range(len(self.batches)):
            yield self.batches[number]


def sized(steps: int, first: int = 0, **options: Any) -> DataLoader:
    """Return a DataLoader of known length."""
    return DataLoader(Numbered(steps, first), batch_size=None, **options)


def unsized(steps: int, first: int = 0, **options: Any) -> DataLoader:
    """Return a DataLoader of unknown length."""
    return DataLoader(Stream(steps, first), batch_size=None, **options)


def joined(examples: list[Batch]) -> Batch:
    """Return the batch of single examples."""
    return join_batches(examples) | {
        key: torch.cat([e[key] for e in examples]) for key in ("name", "single")
    }


def collated(examples: int, batch_size: int, **options: Any) -> DataLoader:
    """Return a DataLoader that joins single examples."""
    return DataLoader(
        Numbered(examples, size=1), batch_size=batch_size, collate_fn=joined, **options
    )


class Resumable:
    """A loader of one's own with a state. endless: goes on where it was left, and ends nowhere."""

    def __init__(self, steps: int, endless: bool = False) -> None:
        self.steps, self.endless, self.position = steps, endless, 0

    def __iter__(self) -> Iterator[Batch]:
        if not self.endless:
            self.position = 0
        while self.endless or self.position < self.steps:
            self.position += 1
            yield named_batch(self.position - 1)

    def state_dict(self) -> dict[str, int]:
        """Return how many batches have been given."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.position = state["position"]


class ResumableWithLength(Resumable):
    """The same, which knows its length."""

    def __len__(self) -> int:
        return self.steps
