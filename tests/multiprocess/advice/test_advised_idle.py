"""The idle time that `advise` estimates for pipeline_parallel is that of real ranks, whose blocks take known times."""

import time
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_distrec import PipelineParallelStrategy, StageSchedule
from lightning_distrec.advice.strategy_advice import ChosenOptions, advise
from lightning_distrec.callbacks.stage_schedule import Work
from lightning_distrec.strategies.estimates.module_sizes import Job
from lightning_distrec.strategies.estimates.step_profile import profile_step
from lightning_distrec.strategies.stages.chain import StageOptions
from tests.support.embedding_models import loader
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS

WIDTH, BATCH, STEPS = 6, 8, 9
SETTINGS = SimpleNamespace(callbacks=[], accumulate_grad_batches=1, gradient_clip_val=None)


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, ms: float) -> Tensor:
        ctx.ms = ms
        time.sleep(len(values) * ms / 1000)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        time.sleep(len(gradient) * 1.5 * ctx.ms / 1000)
        return gradient, None


class Sleeping(nn.Module):
    """A layer that takes its time for each example, in backward half as much again."""

    def __init__(self, ms: float) -> None:
        super().__init__()
        self.layer, self.ms = nn.Linear(WIDTH, WIDTH), ms

    def forward(self, values: Tensor) -> Tensor:
        return _Sleeps.apply(self.layer(values), self.ms)


class Unequal(pl.LightningModule):
    """Blocks of unequal times, and a loss that takes its time too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Sleeping(ms) for ms in (1.0, 1.5, 1.0, 0.5, 1.5, 1.0, 0.5, 1.0)))
        self.head = Sleeping(1.0)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.blocks(batch)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _batches(num: int) -> list[Tensor]:
    return [torch.ones(BATCH, WIDTH) * number for number in range(num)]


class Recorded(StageSchedule):
    """Keeps how long its step has taken."""

    seconds = 0.0

    def _gathered(self, device: torch.device) -> list[Work]:
        work = super()._gathered(device)
        self.seconds = max(entry.end for entry in work) - min(entry.begin for entry in work)
        return work


def _idle(folder: str, options: dict[str, Any]) -> float:
    """Return the idle share of the fastest step, which other load on the machine has disturbed least."""
    shown: list[Any] = [Recorded(f"{folder}/schedule.svg", step=step) for step in range(2, STEPS)]
    strategy = PipelineParallelStrategy(**options)
    devices = rank_and_num_ranks()[1]
    trainer = pl.Trainer(strategy=strategy, devices=devices, callbacks=shown, **DEFAULTS)
    trainer.fit(Unequal(), loader(_batches(STEPS)))
    return min(shown, key=lambda entry: entry.seconds).bubble


OF_TWO: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "1f1b": {"schedule": "1f1b"},
    "interleaved": {"schedule": "interleaved_1f1b", "stages_per_rank": 2},
    "gpipe, 8 micro-batches": {"microbatches": 8},
    "split": {"split": ["blocks.2"]},
}
OF_FOUR: dict[str, dict[str, Any]] = {
    "gpipe": {},
    "1f1b, 8 micro-batches": {"schedule": "1f1b", "microbatches": 8},
    "two by two": {"stages": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "cases"), [(2, OF_TWO), (4, OF_FOUR)])
def test_ranks_idle_as_long_as_is_estimated(tmp_path, num_ranks: int, cases: dict[str, dict[str, Any]]) -> None:
    module = Unequal()
    profile = profile_step(module, _batches(2)[1], BATCH, "32-true", takes_times=True)
    actual = run_each_on_ranks({case: (_idle, str(tmp_path), options) for case, options in cases.items()}, num_ranks)[0]
    job = Job(num_ranks=num_ranks, num_nodes=1, memory_bytes=10**9)
    for case, options in cases.items():
        options_of_stages = ChosenOptions(stages=StageOptions(**options))
        estimates = advise(module, job, SETTINGS, "cpu", profile, options=options_of_stages).estimates
        estimate = next(entry for entry in estimates if entry.strategy == "pipeline_parallel")
        assert estimate.idle == pytest.approx(actual[case], rel=0.1), case
