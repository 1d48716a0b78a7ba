"""Rows find their shards: the user's own, rank 0's, new ones by seed; and no rank holds a whole
table for it."""

import gc
import weakref
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from lightning_distrec.sharding.weights.shard_access import without_guard
from tests.support.cases import Case, check, click_case
from tests.support.click_model import (
    ClickModel,
    EvaluatedModel,
    join_batches,
    rank_loader,
    seeded,
    train_sharded,
)
from tests.support.ranks import rank_and_num_ranks, run_on_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

CUTS = ("table_wise", "row_wise", "column_wise", "table_row_wise")
PARTITIONS = {
    "wide": {"min_partition": 4},
    "narrow": {"min_partition": 4},
    "shared": {"min_partition": 4},
}


def _untrained(cut: str, seed: int) -> dict[str, Tensor]:
    """The weights right after sharding of tables on meta, as rank 0 gathers them."""
    torch.manual_seed(seed)
    model = ClickModel(torch.optim.SGD, {"lr": 0.0}, meta=True)
    return train_sharded(model, 1, {"sharding_types": [cut], "tables": PARTITIONS})[0].final_state


def drawn_by_rank() -> ClickModel:
    """Return a model; rank 0's weights count, which are those of one process."""
    if rank_and_num_ranks()[0]:
        torch.manual_seed(3)
    return ClickModel(*STILL)


STILL = (torch.optim.SGD, {"lr": 0.0})
CASES = {
    cut: click_case(
        *(ClickModel, STILL),
        strategy={"sharding_types": [cut], "tables": PARTITIONS},
        num_ranks=3,
        rests=("",),
    )
    for cut in CUTS
}
IN_ONE_PROCESS = partial(ClickModel, *STILL)
CASES["ranks seeded apart"] = Case(
    module=drawn_by_rank, plain=IN_ONE_PROCESS, join=join_batches, rests=("",), loss_limit=None
)


@pytest.mark.parametrize("name", CASES)
def test_the_users_weights_are_the_first_weights_under_every_sharding_type(name: str) -> None:
    check(CASES[name])


def test_tables_built_on_meta_start_alike_on_any_ranks_and_sharding_types_and_rows_differ() -> None:
    runs = [
        run_on_warm_ranks(_untrained, num_ranks, cut, 5)[0]
        for num_ranks, cut in (
            (1, "table_wise"),
            (2, "row_wise"),
            (3, "column_wise"),
            (3, "table_row_wise"),
        )
    ]
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
    other = run_on_warm_ranks(_untrained, 2, "row_wise", 6)[0]
    assert not any(torch.equal(other[key], runs[0][key]) for key in tables)


class ConstantTables(ClickModel):
    """Its config names an init function."""

    def _build(self) -> None:
        config = EmbeddingBagConfig(
            name="t",
            embedding_dim=56,
            num_embeddings=61,
            feature_names=["a"],
            init_fn=lambda w: nn.init.constant_(w, 0.25),
        )
        self.ebc = EmbeddingBagCollection(tables=[config])


def _constant() -> tuple[bool, Tensor]:
    model = ConstantTables(torch.optim.SGD, {"lr": 0.0}, meta=True)
    was_meta: list[bool] = []
    build = model.configure_model

    def configure() -> None:
        build()
        with without_guard():
            was_meta.append(all(p.is_meta for p in model.ebc.parameters()))

    model.configure_model = configure  # type: ignore[method-assign]
    state = train_sharded(model, 1)[0].final_state
    return was_meta[0], state.get("ebc.embedding_bags.t.weight")


def test_tables_in_configure_model_take_no_memory_and_get_their_own_init_function() -> None:
    was_meta, rows = run_on_warm_ranks(_constant, 2)[0]
    assert was_meta
    assert torch.equal(rows, torch.full((61, 56), 0.25))


class BigTable(ClickModel):
    """One table of 512 MB, built in configure_model."""

    def _build(self) -> None:
        config = EmbeddingBagConfig(
            name="big", embedding_dim=56, num_embeddings=2_400_000, feature_names=["a"]
        )
        self.ebc = EmbeddingBagCollection(tables=[config])


def _peak_growth_bytes() -> int:
    rank, _ = rank_and_num_ranks()
    train_sharded(seeded(ClickModel, torch.optim.SGD, {"lr": 0.1}), 1)
    previous = _peak_bytes()
    model = BigTable(torch.optim.SGD, {"lr": 0.1}, meta=True)
    make_trainer({"sharding_types": ["row_wise"]}).fit(
        _without_final_state(model), rank_loader(2, rank)
    )
    return _peak_bytes() - previous


def _without_final_state(model: ClickModel) -> ClickModel:
    model.on_train_end = lambda: None  # type: ignore[method-assign]
    return model


def _peak_bytes() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))


def test_no_rank_ever_holds_a_whole_table_that_was_built_on_meta() -> None:
    whole = 2_400_000 * 56 * 4
    for growth in run_on_ranks(_peak_growth_bytes, 2):
        assert 0.45 * whole < growth < 0.8 * whole, f"{growth / whole:.2f} of the table"


def _refit_with_another_optimizer() -> dict[str, Any]:
    rank, _ = rank_and_num_ranks()
    model = seeded(EvaluatedModel, torch.optim.SGD, {"lr": 0.0})
    make_trainer({"sharding_types": ["column_wise"], "tables": PARTITIONS}).validate(
        model, rank_loader(1, rank), verbose=False
    )
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


def _left_over(cut: str) -> tuple[int, int]:
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

    train_sharded(model, 2, {"sharding_types": [cut]}, callbacks=[Look()])
    return actual[0]


@pytest.mark.parametrize("cut", ["table_wise", "row_wise", "column_wise"])
def test_whole_tables_are_let_go(cut: str) -> None:
    assert run_on_warm_ranks(_left_over, 2, cut) == [(0, 0), (0, 0)]
