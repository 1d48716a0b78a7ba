"""Fits after a fit: of the same module, of another one, and after a refusal."""

import weakref
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_distrec import gpu
from lightning_distrec.sharding.shard_tables import TableSharding
from tests.multiprocess.optimizers.test_watches import FUSED, KeepsItsOptimizer
from tests.support.cases import check, click_case
from tests.support.click_model import (
    ClickModel,
    EvaluatedModel,
    make_batch,
    rank_loader,
    seeded,
    train_sharded,
)
from tests.support.plain_loop import EVERY_CUT, OPTIMIZERS
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.tiny_tables import TinyTables
from tests.support.trainers import make_trainer

SGD = OPTIMIZERS["SGD"]


class Restores(ClickModel):
    """Puts its first weights back at the end, from a plain state_dict, and what it has from its
    own."""

    def on_train_start(self) -> None:
        self.first_weights = seeded(ClickModel, *SGD).state_dict()

    def on_train_end(self) -> None:
        wrong = self.first_weights | {"ebc.embedding_bags.wide.weight": torch.zeros(3, 16)}
        with pytest.raises(RuntimeError, match=r"\(60, 16\).*\(3, 16\)|size mismatch"):
            self.load_state_dict(wrong)
        self.load_state_dict(self.state_dict())
        self.load_state_dict(self.first_weights, strict=True)


def replace_tables(model: Any) -> None:
    model.ebc = seeded(ClickModel, *SGD).ebc
    model.options = {"lr": 0.0}


DECAYING = (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.05})
CASES = {
    "it goes on with a decay": click_case(KeepsItsOptimizer, DECAYING, fits=2, limit=2e-6),
    "tables are replaced": click_case(
        ClickModel, fits=2, between=replace_tables, rests=("ebc",), limit=2e-6
    ),
    "tiny tables, three ranks": click_case(TinyTables, num_ranks=3),
    "a plain state_dict": click_case(Restores, strategy=EVERY_CUT, rests=("",)),
}


@pytest.mark.parametrize("name", CASES)
def test_fits_go_on_as_in_one_process(name: str) -> None:
    check(CASES[name])


def _refused_between() -> dict[str, Any]:
    rank, _ = rank_and_num_ranks()
    model = seeded(EvaluatedModel, *SGD)
    make_trainer().fit(model, rank_loader(4, rank))
    initial = model.final_state
    errors = []
    for strategy, options in (
        (FUSED, {"gradient_clip_val": 1.0}),
        (FUSED, {"accumulate_grad_batches": 4}),
        ({"memory_bytes_per_rank": 10_000, "sharding_types": ["table_wise"]}, {}),
    ):
        try:
            make_trainer(strategy, **options).fit(model, rank_loader(4, rank))
        except Exception as error:
            errors.append(type(error).__name__)
    model.options = {"lr": 0.0}
    make_trainer().fit(model, rank_loader(1, rank))
    return {"initial": initial, "after": model.final_state, "errors": errors}


def test_a_refused_fit_leaves_the_trained_tables_as_they_are() -> None:
    results = run_on_warm_ranks(_refused_between, 2)
    for result in results:
        assert result["errors"] == ["UnsupportedError", "UnsupportedError", "InfeasiblePlanError"]
    initial, after = results[0]["initial"], results[0]["after"]
    assert all(torch.equal(initial[key], after[key]) for key in initial)


class Borrows(ClickModel):
    """Takes the tables of another module."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self(batch)


def _borrowed() -> str:
    rank, _ = rank_and_num_ranks()
    model = seeded(EvaluatedModel, *SGD)
    make_trainer().fit(model, rank_loader(2, rank))
    other = Borrows(*SGD)
    other.ebc = model.ebc
    try:
        make_trainer().validate(other, rank_loader(1, rank), verbose=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_tables_that_another_module_sharded_are_refused() -> None:
    for output in run_on_warm_ranks(_borrowed, 2):
        assert output.startswith(
            "ShardingError: 'ebc' was sharded as a part of another LightningModule"
        )


def test_a_second_fit_on_a_gpu_shards_after_the_first_ones_shards_are_freed() -> None:
    assert run_on_warm_ranks(_fit_again, 2) == [[0, 0]] * 2


def _fit_again() -> list[int]:
    """Return how many shards and states of the first fit live where the second one shards, as if on
    a GPU."""
    model = seeded(ClickModel, *OPTIMIZERS["Adam"])
    _, trainer = train_sharded(model, 2, {"sharding_types": ["row_wise"]})
    shards = trainer.strategy.optimizers[0].param_groups[0]["params"]
    old = [weakref.ref(p) for p in shards if hasattr(p, "place")]
    states = [
        weakref.ref(trainer.strategy.optimizers[0].state[p]["exp_avg"])
        for p in shards
        if hasattr(p, "place")
    ]
    del shards
    assert old
    assert states
    alive: list[int] = []

    shard = TableSharding.shard

    def look(sharding: TableSharding) -> Any:
        on_gpu.stop()
        alive.extend(
            sum(reference() is not None for reference in references) for references in (old, states)
        )
        return shard(sharding)

    on_gpu = patch.object(gpu, "is_on_gpu", lambda tensor: True)
    with patch.object(TableSharding, "shard", look):
        on_gpu.start()
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, DataLoader([make_batch(1)], batch_size=None))
    return alive
