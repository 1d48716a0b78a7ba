"""With `zero_optimizer` each rank keeps its part of the optimizers' state, and the numbers are those without."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_distrec import TunedDDPStrategy
from lightning_distrec.errors import OptimizerError
from tests.support.dense_models import KINDS, WIDTH, BareAndTied, Recording, WithEmbedding, loader
from tests.support.dense_runs import check_same, fit
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS


class SeveralGroups(BareAndTied):
    """Groups of unlike settings, a convolution, a schedule at every step, and another class of optimizer each time."""

    kind: type[Optimizer] = torch.optim.AdamW

    def __init__(self) -> None:
        super().__init__()
        self.fold = nn.Conv1d(1, 2, 3, padding=1)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs + self.fold(inputs.unsqueeze(1)).mean(1))

    def configure_optimizers(self) -> Any:
        slow = [self.scale, self.still.weight, *self.fold.parameters()]
        slow_ids = {id(p) for p in slow}
        remaining = [p for p in self.parameters() if id(p) not in slow_ids]
        optimizer = self.kind([{"params": slow, "lr": 1e-3, "weight_decay": 0.1}, {"params": remaining}], lr=1e-2)
        momentum = "betas" in optimizer.defaults
        rates = [0.003, 0.03]
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, total_steps=40, cycle_momentum=momentum)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class WithAdagrad(SeveralGroups):
    kind = torch.optim.Adagrad


class WithRAdam(SeveralGroups):
    kind = torch.optim.RAdam


class Unfreezing(SeveralGroups):
    """A layer that is frozen at first."""

    def on_train_epoch_start(self) -> None:
        self.still.requires_grad_(self.current_epoch > 0)


KINDS |= {kind.__name__: kind for kind in (SeveralGroups, WithAdagrad, WithRAdam, Unfreezing)}


def _both(kind: str, settings: dict[str, Any]) -> Any:
    tuned = fit(kind, TunedDDPStrategy(zero_optimizer=True), **settings)
    return tuned, fit(kind, TunedDDPStrategy(), **settings)


CASES: dict[str, tuple[Any, ...]] = {
    "groups": (_both, "SeveralGroups", {}),
    "adagrad": (_both, "WithAdagrad", {}),
    "radam": (_both, "WithRAdam", {}),
    "clipped by norm and accumulated": (
        _both,
        "SeveralGroups",
        {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
    ),
    "clipped by value": (_both, "SeveralGroups", {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
    "bf16": (_both, "SeveralGroups", {"precision": "bf16-mixed"}),
    "bf16 weights": (_both, "SeveralGroups", {"precision": "bf16-true"}),
    "two optimizers by hand": (_both, "TwoByHand", {}),
    "thawing": (_both, "Unfreezing", {}),
}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_losses_and_weights_are_those_without(num_ranks: int) -> None:
    for results in run_each_on_ranks(CASES, num_ranks):
        for tuned, without in results.values():
            check_same(tuned, without)


def _bytes_of_state() -> tuple[int, int]:
    class Wide(Recording):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, 64), *(nn.Linear(64, 64) for _ in range(7)), nn.Linear(64, 1))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.net(inputs)

    rank, num_ranks = rank_and_num_ranks()
    actual = []
    for zero_optimizer in (True, False):
        strategy = TunedDDPStrategy(zero_optimizer=zero_optimizer)
        trainer = pl.Trainer(strategy=strategy, devices=num_ranks, **DEFAULTS)
        look = _Look()
        trainer.callbacks.append(look)
        trainer.fit(Wide(), loader(rank, num_ranks))
        actual.append(look.num_bytes)
    return actual[0], actual[1]


class _Look(Callback):
    num_bytes = 0

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        self.num_bytes = sum(value.nbytes for state in states for value in state.values() if value.dim())


def test_each_rank_keeps_its_part_of_the_state() -> None:
    results = run_on_warm_ranks(_bytes_of_state, 3)
    whole = results[0][1]
    assert sum(part for part, _ in results) == whole
    assert all(part < 0.45 * whole for part, _ in results)


def _save(folder: str, zero_optimizer: bool, distributed: bool) -> Any:
    saving = ModelCheckpoint(folder, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    strategy = TunedDDPStrategy(zero_optimizer=zero_optimizer, checkpoint={"distributed": distributed})
    return fit("SeveralGroups", strategy, callbacks=[saving], enable_checkpointing=True)


def _resume(path: str, zero_optimizer: bool) -> Any:
    return fit("SeveralGroups", TunedDDPStrategy(zero_optimizer=zero_optimizer), ckpt_path=path)


@pytest.mark.parametrize(("saved_with", "distributed"), [(True, True), (True, False), (False, True)])
def test_a_run_goes_on_with_or_without_from_what_was_saved_either_way(
    tmp_path: Path, saved_with: bool, distributed: bool
) -> None:
    whole = run_on_warm_ranks(_save, 2, str(tmp_path), saved_with, distributed)
    calls = {str(z): (_resume, f"{tmp_path}/step=4.ckpt", z) for z in (True, False)}
    for straight, resumed in zip(whole, run_each_on_ranks(calls, 2), strict=True):
        for losses, weights in resumed.values():
            assert losses == pytest.approx(straight[0][4:], abs=1e-6)
            check_same(([], weights), ([], straight[1]))


def test_a_checkpoint_of_two_ranks_gives_the_state_to_three_and_to_one(tmp_path: Path) -> None:
    run_on_warm_ranks(_save, 2, str(tmp_path), True, True)
    path = f"{tmp_path}/step=4.ckpt"
    for num_ranks in (3, 1):
        calls = {str(z): (_resume, path, z) for z in (True, False)}
        for results in run_each_on_ranks(calls, num_ranks):
            check_same(results["True"], results["False"])


class OfTheirOwn(torch.optim.Adam):
    """Looks at all gradients."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


class StepsByItself(BareAndTied):
    def configure_optimizers(self) -> Any:
        return OfTheirOwn(self.parameters())


class WithLBFGS(BareAndTied):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


KINDS |= {kind.__name__: kind for kind in (StepsByItself, WithLBFGS)}


def _refused(kind: str) -> str:
    model = KINDS[kind]()
    trainer = pl.Trainer(strategy=TunedDDPStrategy(zero_optimizer=True), devices=2, **DEFAULTS)
    with pytest.raises(OptimizerError) as refused:
        trainer.fit(model, loader(*rank_and_num_ranks()))
    assert model.losses == []
    return str(refused.value)


@pytest.mark.parametrize(
    ("kind", "output"),
    [
        ("StepsByItself", "OfTheirOwn is not known to update each parameter from its own gradient alone"),
        ("WithLBFGS", "LBFGS is not known to update each parameter from its own gradient alone"),
        (WithEmbedding.__name__, "'table' has sparse gradients, and all of its rows would be sent after every step"),
    ],
)
def test_what_cannot_be_shared_out_is_refused_before_the_first_step(kind: str, output: str) -> None:
    for message in run_on_warm_ranks(_refused, 2, kind):
        assert output in message
        assert "zero_optimizer=False" in message
