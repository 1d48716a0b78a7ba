"""Fits with batches in flight, whose kernels sleep and whose losses stay on the device: the host
runs ahead of it."""

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.gpu.device import ACCELERATOR, DEVICE, own_device, sleep
from tests.support.click_model import make_batch, seeded
from tests.support.followed_fits import Deaf, batch_of
from tests.support.ranks import rank_and_num_ranks
from tests.support.trainers import make_trainer

OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.02}),
    "Adam": (torch.optim.Adam, {"lr": 0.001}),
}
STEPS = 30


class SlowCopies(Deaf):
    """Copies a large tensor before each batch, so that a step that did not wait for its batch would
    use old memory."""

    def transfer_batch_to_device(
        self, batch: Any, device: torch.device, dataloader_idx: int
    ) -> Any:
        torch.empty(64 * 2**20, pin_memory=DEVICE == "cuda").to(device, non_blocking=True)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


@dataclass
class Example:
    """A batch of one's own."""

    ids: Tensor
    lengths: Tensor
    label: Tensor
    sparse: Tensor


class Examples(Deaf):
    """Batches that are dataclasses and hold a sparse tensor, made on the device where `on_device`
    is set."""

    on_device = False

    def train_dataloader(self) -> Any:
        """Yield batches."""
        device = own_device() if self.on_device else torch.device("cpu")
        for number in range(STEPS):
            batch = make_batch(1000 * number + rank_and_num_ranks()[0])
            fields = {key: batch[key].to(device) + 0 for key in ("ids", "lengths", "label")}
            yield Example(**fields, sparse=torch.eye(3, device=device).to_sparse())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(vars(batch), batch_idx)


class ExamplesOnDevice(Examples):
    """The same, from a loader on the device."""

    on_device = True


class Counted(pl.Callback):
    """Keeps how many lookups were sent ahead, and lets the stream of the step lag behind the
    host."""

    message = ""

    def on_train_batch_start(self, *_: Any) -> None:
        sleep()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.message = str(trainer.strategy.lookups_ahead.get("training 0"))


def fit(kind: type, optimizer: str, depth: int, types: list[str]) -> tuple[dict[str, Tensor], str]:
    model = seeded(kind, *OPTIMIZERS[optimizer], pooling="mean")
    count = Counted()
    strategy = {"prefetch": {"depth": depth}, "sharding_types": types, "convert_embeddings": "all"}
    trainer = make_trainer(strategy, accelerator=ACCELERATOR, callbacks=[count])
    own_part = issubclass(kind, Examples)
    batches = (
        None
        if own_part
        else DataLoader([batch_of(kind, number) for number in range(STEPS)], batch_size=None)
    )
    trainer.fit(model, batches)
    return {name: value.cpu() for name, value in model.final_state.items()}, count.message


def fit_both(kind: type, optimizer: str, depth: int, types: list[str]) -> Any:
    return fit(kind, optimizer, 1, types), fit(kind, optimizer, depth, types)
