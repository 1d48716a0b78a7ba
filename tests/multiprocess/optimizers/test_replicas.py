"""What would let replicated weights drift apart is told, and what does not is left alone."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.click_model import ClickModel, largest_difference, seeded, train_sharded
from tests.support.plain_loop import STEPS, global_batches, limit_of, train_plain
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_on_ranks

ADAM = (torch.optim.Adam, {"lr": 0.001})
SGD = (torch.optim.SGD, {"lr": 1.0})


class DependsOnTheRank(ClickModel):
    """Nudges a weight by its rank."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.mlp[2].weight += 0.001 * rank_and_num_ranks()[0]


def _train(kind: type, optimizer: Any, strategy: dict[str, Any], steps: int) -> dict[str, Tensor]:
    return train_sharded(seeded(kind, *optimizer), steps, strategy)[0].final_state


@pytest.mark.parametrize(
    ("kind", "optimizer", "strategy", "message"),
    [
        (
            DependsOnTheRank,
            SGD,
            {},
            "OptimizerError: a projection of 'mlp.2.weight' is no longer the same on all",
        ),
    ],
)
def test_what_makes_weights_drift_apart_is_reported_on_every_rank(
    kind: type, optimizer: Any, strategy: dict[str, Any], message: str
) -> None:
    with pytest.raises(RankFailed) as failed:
        run_on_ranks(_train, 2, kind, optimizer, strategy | {"sharding_types": ["table_wise"]}, 40)
    assert len(re.findall(f"^.*{message}", str(failed.value), re.M)) == 2


class ClipsByItself(ClickModel):
    """Clips by a norm of all gradients, with code of its own."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [
            parameter.grad for parameter in self.parameters() if parameter.grad is not None
        ]
        norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        for gradient in gradients:
            gradient *= (0.01 / norm).clamp(max=1.0)


def test_gradients_that_a_hook_clips_by_their_norm_are_those_of_one_process() -> None:
    actual = run_on_ranks(
        _train, 2, ClipsByItself, ADAM, {"sharding_types": ["table_wise"]}, STEPS
    )[0]
    start = seeded(ClipsByItself, *ADAM)
    expected = train_plain(start, global_batches(STEPS), clip=start.on_before_optimizer_step)
    assert max(largest_difference(actual, expected).values()) <= limit_of("Adam")
