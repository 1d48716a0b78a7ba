"""Fetching ahead on GPUs: copies and exchanges on streams of their own give the numbers of one stream.

One rank for each GPU of the machine, at most two. Skipped, with the reason, where there is none. Losses stay on the
device, and kernels sleep, so that the host runs ahead and a missing wait shows.
"""

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.gpu.device import ACCELERATOR, DEVICE, num_ranks, own_device, runs_here, sleep, synchronize
from tests.support.click_model import make_batch, seeded
from tests.support.emulated_fits import (
    Deaf,
    DeclaredBags,
    JaggedBatches,
    PlainBags,
    RewrittenBuffer,
    Sequences,
    batch_of,
)
from tests.support.ranks import rank_and_num_ranks, run_on_ranks
from tests.support.trainers import make_trainer

pytestmark = runs_here

OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.02}),
    "Adam": (torch.optim.Adam, {"lr": 0.001}),
}
STEPS = 30


class SlowCopies(Deaf):
    """Copies a large tensor before each batch, so that a step that did not wait for its batch would use old memory."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
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
    """Batches that are dataclasses and hold a sparse tensor, made on the device where `on_device` is set."""

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
    """Keeps how many lookups were sent ahead, and lets the stream of the step lag behind the host."""

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
    batches = None if own_part else DataLoader([batch_of(kind, number) for number in range(STEPS)], batch_size=None)
    trainer.fit(model, batches)
    return {name: value.cpu() for name, value in model.final_state.items()}, count.message


def fit_both(kind: type, optimizer: str, depth: int, types: list[str]) -> Any:
    return fit(kind, optimizer, 1, types), fit(kind, optimizer, depth, types)


def check(kind: type, optimizer: str, depth: int, sharding_type: str) -> None:
    """Compare weights after a fit with batches in flight with those after one without."""
    pair = run_on_ranks(fit_both, num_ranks(), kind, optimizer, depth, [sharding_type], timeout_seconds=120)
    for (plain, _), (ahead, count) in pair:
        if kind in (PlainBags, RewrittenBuffer):  # its computed ids are looked at in more steps than one
            assert not count.startswith("0 ")
        else:
            assert count == f"{STEPS - 1} of {STEPS} lookups"
        for name, value in plain.items():
            # FBGEMM's GPU kernels add gradients in no fixed order.
            torch.testing.assert_close(ahead[name], value, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("kind", [Deaf, SlowCopies])
def test_weights_are_those_of_one_batch_at_a_time(kind: type, optimizer: str, depth: int) -> None:
    check(kind, optimizer, depth, "row_wise")


KINDS = [Sequences, JaggedBatches, PlainBags, RewrittenBuffer, DeclaredBags, Examples, ExamplesOnDevice]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_same_for_inputs_and_batches_of_all_kinds(kind: type) -> None:
    # DDP has device_ids here and rebuilds dicts, so that DeclaredBags also shows that batches are recognized.
    check(kind, "Adam", 3, "row_wise")


@pytest.mark.parametrize("sharding_type", ["table_wise", "column_wise", "table_row_wise"])
def test_weights_are_the_same_for_all_sharding_types(sharding_type: str) -> None:
    check(Deaf, "SGD", 3, sharding_type)


def unfreeze(synchronous: bool) -> dict[str, Tensor]:
    model = seeded(Unfreezing, *OPTIMIZERS["SGD"], pooling="mean")
    model.synchronous = synchronous
    trainer = make_trainer({"prefetch": {"depth": 3}}, accelerator=ACCELERATOR, callbacks=[Counted()])
    trainer.fit(model, DataLoader([batch_of(Deaf, number) for number in range(STEPS)], batch_size=None))
    return {name: value.cpu() for name, value in model.final_state.items()}


class Unfreezing(Deaf):
    """Unfreezes a layer in step 10, when DDP is built anew."""

    synchronous = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.extra = torch.nn.Linear(24, 24).requires_grad_(False)
        self.mlp = torch.nn.Sequential(self.extra, self.mlp)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.synchronous:
            synchronize()
        if batch_idx == 10:
            self.extra.requires_grad_(True)


def unfreeze_both() -> Any:
    return unfreeze(True), unfreeze(False)


def test_a_layer_that_is_unfrozen_gets_the_weights_of_one_step_at_a_time() -> None:
    for slow, fast in run_on_ranks(unfreeze_both, num_ranks(), timeout_seconds=120):
        for name, value in slow.items():
            torch.testing.assert_close(fast[name], value, atol=1e-6, rtol=1e-5, msg=name)
