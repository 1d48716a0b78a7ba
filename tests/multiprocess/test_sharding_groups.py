"""Tables that are sharded within groups of ranks, with a replica in each: exact at sync_interval=1, told above."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_distrec.sharding.sharded_tables import sharded_tables_of
from tests.support.click_model import (
    ClickModel,
    SequenceModel,
    join_batches,
    largest_difference,
    make_batch,
    rank_loader,
    seeded,
)
from tests.support.plain_loop import OPTIMIZERS, State, limit_of, loss_of, train_plain
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import make_trainer

EVERY_TYPE: dict[str, Any] = {
    "tables": {
        "wide": {"sharding_types": ["row_wise"]},
        "narrow": {"sharding_types": ["column_wise"], "min_partition": 4},
        "shared": {"sharding_types": ["table_wise"]},
    }
}
BY_ROWS: dict[str, Any] = {"sharding_types": ["table_wise", "row_wise"]}
STEPS = 7
GROUPS = (range(2), range(2, 4))


def joined(step: int, ranks: range = range(4)) -> dict[str, Tensor]:
    """Return one batch of those that these ranks have in a step."""
    return join_batches([make_batch(1000 * step + rank) for rank in ranks])


def fit(kind: type, name: str, options: dict[str, Any], interval: int, **of_trainer: Any) -> dict[str, Any]:
    """Train in groups of two ranks; return the state on rank 0, and this rank's shards after the fit."""
    model = seeded(kind, *OPTIMIZERS[name])
    trainer = make_trainer(options | {"sharding_groups": {"size": 2, "sync_interval": interval}}, **of_trainer)
    trainer.fit(model, rank_loader(STEPS, rank_and_num_ranks()[0]))
    tables = sharded_tables_of(model)
    assert tables is not None
    shards = {name: [s.tensor.detach().clone() for s in w.local_shards()] for name, w in tables.weights().items()}
    return {"state": model.final_state, "shards": shards, "losses": model.losses}


EXACT: dict[str, tuple[Any, ...]] = {
    "Adagrad": (fit, ClickModel, "Adagrad", EVERY_TYPE, 1),
    "RowWiseAdagrad": (fit, ClickModel, "RowWiseAdagrad", BY_ROWS, 1),
    "sequences": (fit, SequenceModel, "SGD", {}, 1),
    "not prefetched": (fit, ClickModel, "Adagrad", EVERY_TYPE | {"pipeline": {"depth": 1}}, 1),
}
AVERAGED: dict[str, tuple[Any, ...]] = {
    "Adagrad": (fit, ClickModel, "Adagrad", EVERY_TYPE, 3),
    "RowWiseAdagrad": (fit, ClickModel, "RowWiseAdagrad", BY_ROWS, 3),
    "Adam": (fit, ClickModel, "Adam", EVERY_TYPE, 3),
}
RUNS = {
    **{f"exact {name}": run for name, run in EXACT.items()},
    **{f"averaged {name}": run for name, run in AVERAGED.items()},
}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What each rank has after each run."""
    return run_each_on_ranks(RUNS, 4)


@pytest.mark.parametrize("run", EXACT)
def test_groups_that_exchange_gradients_train_as_one_process(run: str, found: list[dict[str, Any]]) -> None:
    _, kind, name, *_ = EXACT[f"{run}"]
    wanted = train_plain(seeded(kind, *OPTIMIZERS[name]), [joined(step) for step in range(STEPS)])
    differences = largest_difference(found[0][f"exact {run}"]["state"], wanted)
    assert max(differences.values()) <= limit_of(name), differences


@pytest.mark.parametrize("run", RUNS)
def test_replicas_are_equal_to_the_bit_after_a_fit(run: str, found: list[dict[str, Any]]) -> None:
    for here, there in ((0, 2), (1, 3)):
        for name, shards in found[here][run]["shards"].items():
            for one, other in zip(shards, found[there][run]["shards"][name], strict=True):
                assert torch.equal(one, other), name


def train_apart(name: str, interval: int) -> State:
    """Train two copies by a plain loop, tables each on half of the batch, other layers on all of it."""
    models = [seeded(ClickModel, *OPTIMIZERS[name]) for _ in GROUPS]
    optimizers = [model.configure_optimizers() for model in models]
    for step in range(STEPS):
        for model, optimizer, ranks in zip(models, optimizers, GROUPS, strict=True):
            optimizer.zero_grad()
            loss_of(model, joined(step, ranks)).backward()
        for one, other in zip(*(model.mlp.parameters() for model in models), strict=True):
            one.grad = other.grad = (one.grad + other.grad) / 2
        for optimizer in optimizers:
            optimizer.step()
        if (step + 1) % interval == 0 or step + 1 == STEPS:
            average(models, optimizers)
    return models[0].state_dict()


@torch.no_grad()
def average(models: list[ClickModel], optimizers: list[Any]) -> None:
    """Replace tables and their optimizer state by their mean."""
    for pair in zip(*(model.ebc.parameters() for model in models), strict=True):
        states = [optimizer.state[each] for optimizer, each in zip(optimizers, pair, strict=True)]
        for tensors in [pair, *(tuple(state[key] for state in states) for key in states[0] if key != "step")]:
            mean = (tensors[0] + tensors[1]) / 2
            for tensor in tensors:
                tensor.copy_(mean)


@pytest.mark.parametrize("name", AVERAGED)
def test_groups_that_average_rows_train_as_copies_that_train_apart(name: str, found: list[dict[str, Any]]) -> None:
    differences = largest_difference(found[0][f"averaged {name}"]["state"], train_apart(name, 3))
    assert max(differences.values()) <= limit_of(name), differences
    exact = train_plain(seeded(ClickModel, *OPTIMIZERS[name]), [joined(step) for step in range(STEPS)])
    assert max(largest_difference(exact, train_apart(name, 3)).values()) > 100 * limit_of(name)
