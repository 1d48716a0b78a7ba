"""A rank of a pipeline that dies, stops or fails in the middle of a schedule: the others end, and
name it."""

import os
import signal
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn

from lightning_distrec import PipelineParallelStrategy
from tests.support.chain_models import Transformer
from tests.support.parameters import slow_except
from tests.support.ranks import (
    FAREWELL_SECONDS,
    RankFailed,
    rank_and_num_ranks,
    run_on_ranks,
    run_on_warm_ranks,
    words_of_ranks,
)
from tests.support.trainers import DEFAULTS

FAULTY, MICROBATCH = 1, 2
GONE = f"rank {FAULTY} has died: its process is gone"
STOPPED = f"rank {FAULTY} has been silent for 3 s: it is stopped, or"
PARTED = f"rank {FAULTY}: train batch 3, exchanges "
FAILED = f"rank {FAULTY} failed: ValueError: a fault of this rank alone"


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, fault: Any) -> Tensor:
        ctx.fault = fault
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.fault()
        return gradient, None


class Faulty(nn.Module):
    """A block in which the rank fails at a micro-batch of the third step."""

    def __init__(self, block: nn.Module, kind: str, place: str) -> None:
        super().__init__()
        self.block, self.kind, self.place, self.calls = block, kind, place, 0

    def forward(self, value: Tensor, **options: Any) -> Tensor:
        value = self.block(value, **options)
        if not self.training or not torch.is_grad_enabled():
            return value
        self.calls += 1
        if self.calls != 1 + 2 * 4 + MICROBATCH:  # the first call infers shapes
            return value
        if self.place == "backward":
            return _Backward.apply(value, self.fail)
        self.fail()
        return value

    def fail(self) -> None:
        """Fail."""
        if self.kind == "sleep":
            time.sleep(3600)
        if self.kind == "raise":
            raise ValueError("a fault of this rank alone")
        signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "terminate": signal.SIGTERM}
        os.kill(os.getpid(), signals[self.kind])


def _fit(kind: str, place: str, options: dict[str, Any]) -> tuple[int, str]:
    """Return the step at which the run has ended, and the signal that has ended it."""
    pl.seed_everything(5)
    model, (rank, num_ranks) = Transformer(), rank_and_num_ranks()
    first = rank * 4 // num_ranks  # of this rank's blocks
    if rank == FAULTY:
        original = model.blocks[first].forward
        faulty = Faulty(nn.Identity(), kind, place)
        model.blocks[first].forward = lambda *args, **kwargs: faulty(original(*args, **kwargs))  # type: ignore[method-assign]
    strategy = PipelineParallelStrategy(watchdog_seconds=3, **{"timeout_seconds": 30} | options)
    trainer = pl.Trainer(
        strategy=strategy, devices=num_ranks, **DEFAULTS | {"limit_val_batches": 0}
    )
    try:
        trainer.fit(model)
    except SIGTERMException as stop:
        return trainer.global_step, str(stop)
    return trainer.global_step, ""


CASES = [
    (2, "kill", "forward", {}),
    (2, "stop", "forward", {}),
    (2, "raise", "backward", {"schedule": "1f1b"}),
    (2, "sleep", "forward", {"timeout_seconds": 8}),
    (4, "kill", "backward", {}),
]


@pytest.mark.parametrize(("num_ranks", "kind", "place", "options"), slow_except(CASES[:1], CASES))
def test_the_others_end_and_name_a_rank_that_fails_in_a_schedule(
    num_ranks: int, kind: str, place: str, options: dict[str, Any]
) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        run_on_ranks(_fit, num_ranks, kind, place, options)
    # A rank that is stopped is ended by who has started it.
    assert time.monotonic() - began < FAREWELL_SECONDS + 40
    words = words_of_ranks(failed.value)
    assert set(words) == set(range(num_ranks))
    if kind == "raise":
        assert words[FAULTY].rstrip().endswith("ValueError: a fault of this rank alone")
    if kind == "sleep":
        assert "Terminating this rank: rank 0 has ended after a failed collective" in words[FAULTY]
    for rank in set(words) - {FAULTY}:
        assert {"kill": GONE, "stop": STOPPED, "raise": FAILED, "sleep": PARTED}[kind] in words[
            rank
        ], words[rank]


def test_a_signal_in_a_schedule_stops_all_ranks_after_the_same_step() -> None:
    options = {"schedule": "1f1b"}
    first, *other_ranks = run_on_warm_ranks(_fit, 2, "terminate", "backward", options)
    assert 3 <= first[0] <= 5
    assert "143" in first[1]
    assert all(result == first for result in other_ranks)
