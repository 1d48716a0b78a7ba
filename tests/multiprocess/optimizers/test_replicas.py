"""What would let replicated weights drift apart is told, and what does not is left alone."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.click_model import ClickModel, seeded, train_sharded
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_on_ranks

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
        (DependsOnTheRank, SGD, {}, "OptimizerError: 'mlp.2.weight' is no longer the same on all ranks"),
    ],
)
def test_what_makes_weights_drift_apart_is_reported_on_every_rank(
    kind: type, optimizer: Any, strategy: dict[str, Any], message: str
) -> None:
    with pytest.raises(RankFailed) as failed:
        run_on_ranks(_train, 2, kind, optimizer, strategy | {"sharding_types": ["table_wise"]}, 40)
    assert len(re.findall(f"^.*{message}", str(failed.value), re.M)) == 2
