"""Fetching ahead on GPUs: copies and exchanges on streams of their own give the numbers of one
stream.

One rank for each GPU of the machine, at most two. Skipped, with the reason, where there is none.
Losses stay on the device, and kernels sleep, so that the host runs ahead and a missing wait shows.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.gpu.device import ACCELERATOR, num_ranks, synchronize
from tests.gpu.marks import runs_here
from tests.gpu.prefetched_fits import (
    OPTIMIZERS,
    STEPS,
    Counted,
    Examples,
    ExamplesOnDevice,
    SlowCopies,
    fit_both,
)
from tests.support.click_model import seeded
from tests.support.followed_fits import (
    Deaf,
    DeclaredBags,
    JaggedBatches,
    PlainBags,
    RewrittenBuffer,
    Sequences,
    batch_of,
)
from tests.support.ranks import run_on_ranks
from tests.support.trainers import make_trainer

pytestmark = runs_here


def check(kind: type, optimizer: str, depth: int, sharding_type: str) -> None:
    """Compare weights after a fit with batches in flight with those after one without."""
    pair = run_on_ranks(
        fit_both, num_ranks(), kind, optimizer, depth, [sharding_type], timeout_seconds=120
    )
    for (plain, _), (ahead, count) in pair:
        # its computed ids are looked at in more steps than one
        if kind in (PlainBags, RewrittenBuffer):
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


KINDS = [
    Sequences,
    JaggedBatches,
    PlainBags,
    RewrittenBuffer,
    DeclaredBags,
    Examples,
    ExamplesOnDevice,
]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_the_same_for_inputs_and_batches_of_all_kinds(kind: type) -> None:
    # DDP has device_ids here and rebuilds dicts, so that DeclaredBags also shows that batches are
    # recognized.
    check(kind, "Adam", 3, "row_wise")


@pytest.mark.parametrize("sharding_type", ["table_wise", "column_wise", "table_row_wise"])
def test_weights_are_the_same_for_all_sharding_types(sharding_type: str) -> None:
    check(Deaf, "SGD", 3, sharding_type)


def unfreeze(synchronous: bool) -> dict[str, Tensor]:
    model = seeded(Unfreezing, *OPTIMIZERS["SGD"], pooling="mean")
    model.synchronous = synchronous
    trainer = make_trainer(
        {"prefetch": {"depth": 3}}, accelerator=ACCELERATOR, callbacks=[Counted()]
    )
    trainer.fit(
        model, DataLoader([batch_of(Deaf, number) for number in range(STEPS)], batch_size=None)
    )
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
