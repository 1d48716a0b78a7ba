"""An L2 term over sharded tables gives the numbers of the same term over whole ones."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_distrec import sharded_l2
from lightning_distrec.errors import ShardingError
from tests.support.click_model import (
    ClickModel,
    join_batches,
    largest_difference,
    make_batch,
    seeded,
)
from tests.support.plain_loop import EVERY_CUT, OPTIMIZERS, limit_of
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

STEPS = 6
SPARSE = EVERY_CUT | {"embedding_update": "sparse"}
SIZES = {"equal": (8, 8), "unequal": (4, 12)}


class WithTerm(ClickModel):
    """Has the squares of all tables, and the norm of one, in its loss."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        norm = sharded_l2(self.ebc.embedding_bags["wide"]).sqrt()
        loss = super().training_step(batch, batch_idx) + 0.05 * sharded_l2(self.ebc) + 0.1 * norm
        self.losses[-1] = float(loss.detach())
        return loss


def _batch(step: int, rank: int, sizes: str) -> dict[str, Tensor]:
    return make_batch(1000 * step + rank, SIZES[sizes][rank])


def _train(
    name: str, strategy: dict[str, Any], sizes: str, accumulate: int = 1
) -> tuple[dict[str, Tensor], list[float]]:
    rank = rank_and_num_ranks()[0]
    model = seeded(WithTerm, *OPTIMIZERS[name])
    batches = [_batch(step, rank, sizes) for step in range(STEPS)]
    make_trainer(strategy, accumulate_grad_batches=accumulate).fit(
        model, DataLoader(batches, batch_size=None)
    )
    return model.final_state, model.losses


def _unsharded(name: str, sizes: str, accumulate: int = 1) -> ClickModel:
    model = seeded(WithTerm, *OPTIMIZERS[name])
    optimizer = model.configure_optimizers()
    for step in range(STEPS):
        batch = join_batches([_batch(step, rank, sizes) for rank in range(2)])
        (model.training_step(batch, step) / accumulate).backward()
        if (step + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return model


CASES: dict[str, tuple[Any, ...]] = {
    "Adam": ("Adam", EVERY_CUT, "equal"),
    "Adam unequal": ("Adam", EVERY_CUT, "unequal"),
    "Adam accumulated": ("Adam", EVERY_CUT, "equal", 3),
    "SGD": ("SGD", SPARSE | {"tables": {"wide": {"sharding_types": ["row_wise"]}}}, "unequal"),
    "Adagrad": (
        "Adagrad",
        SPARSE | {"tables": {"wide": {"sharding_types": ["row_wise"]}}},
        "equal",
    ),
    "RowWiseAdagrad": ("RowWiseAdagrad", {"embedding_update": "dense"}, "equal"),
}


def test_the_term_and_its_gradients_are_those_of_whole_tables() -> None:
    actual = run_each_on_ranks({case: (_train, *arguments) for case, arguments in CASES.items()}, 2)
    for case, (name, _, *options) in CASES.items():
        expected = _unsharded(name, *options)
        difference = largest_difference(actual[0][case][0], expected.state_dict())
        assert max(difference.values()) <= limit_of(name), f"{case}: {difference}"
        sizes = SIZES[options[0]]
        losses = [
            sum(size * loss for size, loss in zip(sizes, rank_results, strict=True)) / sum(sizes)
            for rank_results in zip(*(rank[case][1] for rank in actual), strict=True)
        ]
        assert losses == pytest.approx(expected.losses, rel=1e-5)


def test_the_term_of_a_table_that_is_updated_in_backward_is_refused_with_a_way_out() -> None:
    with pytest.raises(RankFailed, match="embedding_update='sparse'.*lightning_distrec.sharded_l2"):
        run_on_warm_ranks(_train, 2, "SGD", {}, "equal")


def test_unsharded_tables_have_the_same_term() -> None:
    table = nn.Embedding(5, 4)
    sharded_l2(nn.Sequential(table, nn.Linear(4, 1))).backward()
    assert torch.equal(table.weight.grad, 2 * table.weight.detach())
    with pytest.raises(ShardingError, match="sharded_l2: Linear has no embedding tables"):
        sharded_l2(nn.Linear(4, 1))
