"""`ddp_tuned` has the numbers of Lightning's `ddp`, and of one process, whatever is tuned."""

import copy
import io
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_distrec import TunedDDPStrategy
from tests.support.dense_models import KINDS, BareAndTied, loader
from tests.support.dense_runs import Outcome, fit, make_dense_trainer
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks


def _fit_with(kind: str, options: dict[str, Any], settings: dict[str, Any]) -> Outcome:
    return fit(kind, TunedDDPStrategy(**options), **settings)


@pytest.mark.parametrize(
    ("comm_dtype", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_gradients_travel_and_are_added_as_16_bit_numbers(
    comm_dtype: str, dtype: torch.dtype
) -> None:
    settings = {"max_steps": 1, "max_epochs": -1}
    results = run_on_warm_ranks(
        _fit_with, 2, "WithoutMomentum", {"comm_dtype": comm_dtype}, settings
    )
    pl.seed_everything(5)
    start = WithoutMomentum()
    shares = []
    for rank in range(2):
        start.zero_grad()
        inputs, targets = next(iter(loader(rank, 2)))
        torch.nn.functional.mse_loss(start(inputs), targets).backward()
        shares.append({
            name: (p.grad.to(dtype) / 2)
            for name, p in start.named_parameters()
            if p.grad is not None
        })
    for _, weights in results:
        for name, parameter in start.named_parameters():
            if name in shares[0]:
                gradient = (shares[0][name] + shares[1][name]).float()
                assert torch.equal(weights[name], parameter.detach() - gradient), name


class WithoutMomentum(BareAndTied):
    """A step subtracts the gradient."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)


KINDS["WithoutMomentum"] = WithoutMomentum


def _pickled() -> list[tuple[float, ...]]:
    """Return losses of a fit that goes on in a pickled copy of its trainer, and of one that goes on
    itself."""
    batches, actual = loader(*rank_and_num_ranks()), []
    for is_pickled in (True, False):
        pl.seed_everything(5)
        model = BareAndTied()
        trainer = make_dense_trainer(TunedDDPStrategy(), max_epochs=1)
        trainer.fit(model, batches)
        if is_pickled:
            torch.save(trainer, file := io.BytesIO())
            file.seek(0)
            trainer = torch.load(file, weights_only=False)
            trainer.strategy.connect(model := copy.deepcopy(model))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, batches)
        actual.append(tuple(model.losses))
    return actual


def test_a_trainer_can_be_pickled_and_its_copy_trains_on() -> None:
    for losses, losses_of_copy in run_on_warm_ranks(_pickled, 2):
        assert len(losses) == 12
        assert losses == losses_of_copy
