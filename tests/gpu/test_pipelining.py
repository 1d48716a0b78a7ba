"""Fetching ahead on GPUs: copies and exchanges on streams of their own give the numbers of one stream.

One rank for each GPU of the machine, at most two. Skipped, with the reason, where there is none.
"""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.click_model import ClickModel, make_batch, seeded
from tests.support.ranks import rank_and_num_ranks, run_on_ranks
from tests.support.trainers import make_trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine")

OPTIMIZERS: dict[str, tuple[type, dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.02}),
    "Adam": (torch.optim.Adam, {"lr": 0.001}),
}
STEPS = 30


def num_ranks() -> int:
    """Return how many ranks this machine can have."""
    return min(2, torch.cuda.device_count())


class SlowCopies(ClickModel):
    """Copies a large tensor before each batch, so that a step that did not wait for its batch would use old memory."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        torch.empty(64 * 2**20, pin_memory=True).to(device, non_blocking=True)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)


class Counted(pl.Callback):
    """Keeps how many lookups were sent ahead."""

    said = ""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.said = str(trainer.strategy.lookups_ahead.get("training 0"))


def fit(kind: type, optimizer: str, depth: int) -> tuple[dict[str, torch.Tensor], str]:
    model = seeded(kind, *OPTIMIZERS[optimizer])
    count, rank = Counted(), rank_and_num_ranks()[0]
    trainer = make_trainer({"pipeline": {"depth": depth}}, accelerator="gpu", callbacks=[count])
    trainer.fit(model, DataLoader([make_batch(1000 * step + rank) for step in range(STEPS)], batch_size=None))
    return {name: value.cpu() for name, value in model.final_state.items()}, count.said


def fit_both(kind: type, optimizer: str, depth: int) -> Any:
    return fit(kind, optimizer, 1), fit(kind, optimizer, depth)


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("kind", [ClickModel, SlowCopies])
def test_weights_are_those_of_one_batch_at_a_time(kind: type, optimizer: str, depth: int) -> None:
    for (plain, _), (ahead, count) in run_on_ranks(fit_both, num_ranks(), kind, optimizer, depth, timeout_seconds=120):
        assert count == f"{STEPS - 1} of {STEPS} lookups"
        for name, value in plain.items():
            # FBGEMM's GPU kernels add gradients in no fixed order.
            torch.testing.assert_close(ahead[name], value, atol=1e-6, rtol=1e-5, msg=name)
