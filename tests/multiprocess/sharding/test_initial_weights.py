"""Rows find their shards: the user's own, rank 0's, new ones by seed; and no rank holds a whole
table for it."""

import gc
import weakref
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tests.support.cases import Case, check
from tests.support.click_model import (
    ClickModel,
    EvaluatedModel,
    join_batches,
    rank_loader,
    seeded,
    train_sharded,
)
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

STILL = (torch.optim.SGD, {"lr": 0.0})


def cut(*types: str) -> dict[str, Any]:
    """Return the strategy's options for tables of these sharding types."""
    pairs = zip(("wide", "narrow", "shared"), types, strict=True)
    tables = {name: {"sharding_types": [kind], "min_partition": 4} for name, kind in pairs}
    return {"tables": tables}


CUTS = (
    cut("row_wise", "column_wise", "table_wise"),
    cut("table_row_wise", "row_wise", "column_wise"),
)


def _untrained(strategy: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """The weights right after sharding of tables on meta, as rank 0 gathers them."""
    torch.manual_seed(seed)
    return train_sharded(ClickModel(*STILL, meta=True), 1, strategy)[0].final_state


def drawn_by_rank() -> ClickModel:
    """Return a model; rank 0's weights count, which are those of one process."""
    if rank_and_num_ranks()[0]:
        torch.manual_seed(3)
    return ClickModel(*STILL)


@pytest.mark.parametrize("strategy", CUTS)
def test_the_users_weights_of_rank_zero_are_the_first_weights(strategy: dict[str, Any]) -> None:
    fields = {"join": join_batches, "rests": ("",), "num_ranks": 3, "loss_limit": None, "steps": 2}
    plain = partial(ClickModel, *STILL)
    check(Case(module=drawn_by_rank, plain=plain, strategy=strategy, **fields))


def test_tables_built_on_meta_start_alike_on_any_ranks_and_sharding_types_and_rows_differ() -> None:
    ways = ((2, CUTS[0]), (3, CUTS[1]))
    runs = [run_on_warm_ranks(_untrained, ranks, strategy, 5)[0] for ranks, strategy in ways]
    tables = [key for key in runs[0] if "embedding" in key]
    for run in runs[1:]:
        assert all(torch.equal(run[key], runs[0][key]) for key in tables)
    for key in tables:
        rows = runs[0][key]
        bound = 1 / len(rows) ** 0.5  # the config's default: uniform in +-1/sqrt(rows)
        assert len(rows.unique(dim=0)) == len(rows)
        assert 0.8 * bound < float(rows.abs().max()) <= bound
    narrow, shared = (
        runs[0][f"ebc.embedding_bags.{name}.weight"][:11].flatten() for name in ("narrow", "shared")
    )
    assert abs(float(torch.corrcoef(torch.stack([narrow, shared]))[0, 1])) < 0.5, (
        "each table draws numbers of its own"
    )
    other = run_on_warm_ranks(_untrained, 2, CUTS[0], 6)[0]
    assert not any(torch.equal(other[key], runs[0][key]) for key in tables)


def _refit_with_another_optimizer() -> dict[str, Any]:
    rank, _ = rank_and_num_ranks()
    model = seeded(EvaluatedModel, torch.optim.SGD, {"lr": 0.0})
    make_trainer({
        "sharding_types": ["column_wise"],
        "tables": {"*": {"min_partition": 4}},
    }).validate(model, rank_loader(1, rank), verbose=False)
    states = []
    # A plan by columns does not suit the second optimizer, and the third keeps gradients: rows
    # travel each time.
    for optimizer in (torch.optim.Adagrad, torch.optim.SGD, torch.optim.Adam):
        model.optimizer, model.options = optimizer, {"lr": 0.0}
        make_trainer({"tables": {"wide": {"sharding_types": ["row_wise"]}}}).fit(
            model, rank_loader(1, rank)
        )
        states.append(model.final_state)
    return {"states": states}


def test_sharding_again_keeps_every_row_whatever_the_next_plan_and_optimizer() -> None:
    actual = run_on_warm_ranks(_refit_with_another_optimizer, 2)[0]["states"]
    expected = seeded(EvaluatedModel, torch.optim.SGD, {"lr": 0.0}).state_dict()
    for state in actual:
        assert all(torch.equal(state[key], expected[key]) for key in expected)


def _left_over() -> tuple[int, int]:
    """Return how many whole tables are alive while training, and how many shards hang on autograd's
    graph."""
    model = seeded(ClickModel, torch.optim.SGD, {"lr": 0.1})
    whole = [weakref.ref(parameter) for parameter in model.ebc.parameters()]
    actual: list[tuple[int, int]] = []

    class Look(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            gc.collect()
            weights = trainer.strategy.run_tables.shards.weights().values()
            pieces = [piece.tensor for weight in weights for piece in weight.local_shards()]
            actual.append((
                sum(ref() is not None for ref in whole),
                sum(p.grad_fn is not None for p in pieces),
            ))

    train_sharded(model, 2, CUTS[0], callbacks=[Look()])
    return actual[0]


def test_whole_tables_are_let_go() -> None:
    assert run_on_warm_ranks(_left_over, 2) == [(0, 0), (0, 0)]
