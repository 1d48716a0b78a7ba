"""What is easily lost while weights are gathered and freed under `fsdp_tuned` is told on every
rank."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.nn import functional

from lightning_distrec import TunedDDPStrategy, TunedFSDPStrategy
from lightning_distrec.errors import ConfigError
from tests.multiprocess.strategies.test_dense_strategies import case
from tests.support.cases import Case, check_refused
from tests.support.dense_models import WIDTH, Recording, Small, loader
from tests.support.dense_runs import make_dense_trainer, whole_weights
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks

BLOCKS: dict[str, Any] = {"min_num_parameters": 8}
ROOT: dict[str, Any] = {"wrap": []}
State = dict[str, Tensor]


class Fails(Small):
    """Fails once, in the third step."""

    has_failed = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and not self.has_failed:
            self.has_failed = True
            raise ValueError("this once")
        return loss


def _fails_and_fits_again(strategy: Any) -> State:
    pl.seed_everything(5)
    model, batches = Fails(), loader(*rank_and_num_ranks())
    with pytest.raises(ValueError, match="this once"):
        make_dense_trainer(copy.deepcopy(strategy), accumulate_grad_batches=4).fit(model, batches)
    trainer = make_dense_trainer(strategy, accumulate_grad_batches=4)
    trainer.fit(model, batches)
    return whole_weights(trainer)


def test_a_run_that_failed_leaves_nothing_to_the_next() -> None:
    kinds = {"ddp": "ddp", "blocks": TunedFSDPStrategy(**BLOCKS), "root": TunedFSDPStrategy(**ROOT)}
    calls = {name: (_fails_and_fits_again, strategy) for name, strategy in kinds.items()}
    actual = run_each_on_ranks(calls, 2)[0]
    for name in ("blocks", "root"):
        torch.testing.assert_close(actual[name], actual["ddp"], atol=1e-5, rtol=1e-5)


class Averages(Small):
    """Keeps an average of its weights inside of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(WIDTH, 8).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.slow.weight.lerp_(self.net[0].weight, 0.1)
        return loss


class Penalized(Small):
    """Learns from a gradient of its output."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs = batch[0].requires_grad_()
        outputs = self(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return functional.mse_loss(outputs, batch[1]) + slope.norm()


class TwoTypes(Small):
    """Weights of 32 and of 64 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))


class KeepsForGood(Small):
    """Has a parameter in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = (self.net[0].weight, 2)


class Lazy(Recording):
    """A layer that waits for its first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LazyLinear(1)


class WithAdafactor(Small):
    """Its optimizer looks at whole weights."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters())


def root(kind: type) -> Case:
    return case(kind, TunedFSDPStrategy(**ROOT))


REFUSED = {
    "a step has written to 'slow.weight' while it was gathered": root(Averages),
    "backward ran twice (gradients of gradients)": case(Penalized, TunedFSDPStrategy(**BLOCKS)),
    "parameters outside of blocks: 'fine' (float64), ": root(TwoTypes),
    "'net.weight' has no shape before the first forward (a lazy module)": root(Lazy),
    "torch.optim.Adafactor fails, or has other numbers": case(
        WithAdafactor, TunedFSDPStrategy(**BLOCKS)
    ),
    "self['pair'][0] keeps a parameter in a tuple or a set": root(KeepsForGood),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_be_lost_is_reported_on_every_rank(message: str) -> None:
    check_refused(REFUSED[message], message)


def _sharded_before() -> list[str]:
    errors = []
    for strategy in (TunedFSDPStrategy(**BLOCKS), TunedDDPStrategy()):
        model = Small()
        make_dense_trainer(TunedFSDPStrategy(**ROOT)).fit(model, loader(*rank_and_num_ranks()))
        try:
            make_dense_trainer(strategy).fit(model, loader(*rank_and_num_ranks()))
        except ConfigError as error:
            errors.append(str(error))
    return errors


def test_a_module_that_was_sharded_otherwise_is_refused() -> None:
    for blocks, by_ddp in run_on_warm_ranks(_sharded_before, 2):
        assert "an earlier run has sharded this module as FSDPOptions(wrap=" in blocks
        assert "ddp_tuned: 'net.0.weight' was sharded over the ranks by an earlier" in by_ddp


def _resumes_averages(folder: str, average: Any) -> list[State]:
    """Return weights of a run that never stopped, and of one that went on from its second epoch."""
    states = []
    for path in (None, f"{folder}/epoch=1.ckpt"):
        pl.seed_everything(5)
        saving = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        callbacks = [average(), *([saving] if path is None else [])]
        settings = {"callbacks": callbacks, "enable_checkpointing": path is None, "max_epochs": 4}
        trainer = make_dense_trainer(TunedFSDPStrategy(**BLOCKS), **settings)
        trainer.fit(Small(), loader(*rank_and_num_ranks()), ckpt_path=path)
        states.append(whole_weights(trainer))
    return states


AVERAGES = [
    partial(EMAWeightAveraging, decay=0.8),
    partial(StochasticWeightAveraging, 1e-3, swa_epoch_start=1),
]


@pytest.mark.parametrize("average", AVERAGES, ids=["moving", "stochastic"])
def test_averages_go_on_where_a_checkpoint_left_them(average: Any, tmp_path: Path) -> None:
    straight, resumed = run_on_warm_ranks(_resumes_averages, 2, str(tmp_path), average)[0]
    torch.testing.assert_close(resumed, straight, atol=1e-6, rtol=1e-6)
