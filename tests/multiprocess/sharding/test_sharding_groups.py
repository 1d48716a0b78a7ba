"""Tables that are sharded within groups of ranks, each with a replica: exact at sync_interval=1, or
with a warning."""

import copy
import os
import re
from collections.abc import Container, Iterable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from lightning_distrec import Communication, NormalizeRows, TorchRecShardedStrategy
from lightning_distrec.callbacks.table_callbacks import scale_rows
from lightning_distrec.errors import ConfigError
from lightning_distrec.sharding.sharded_tables import sharded_tables_of
from tests.support.click_model import (
    FEATURES,
    ClickModel,
    EvaluatedModel,
    SequenceModel,
    _mean,
    join_batches,
    largest_difference,
    make_batch,
    seeded,
)
from tests.support.console import fit_by_console
from tests.support.parameters import slow_except
from tests.support.plain_loop import OPTIMIZERS, State, limit_of, loss_of
from tests.support.prefetched_faults import Signalled
from tests.support.ranks import (
    rank_and_num_ranks,
    run_each_on_ranks,
    run_on_ranks,
    run_on_warm_ranks,
)
from tests.support.resuming import Life, Run, live, problems_of
from tests.support.trainers import DEFAULTS, make_trainer
from tests.support.weighted_models import PositionWeighted

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
WIDE = "ebc.embedding_bags.wide.weight"
LIMIT = 0.05
"""Of norms, where gradients are clipped."""


def batch_of(step: int, rank: int, unequal: bool = False) -> dict[str, Tensor]:
    return make_batch(1000 * step + rank, 8 - 2 * rank if unequal else 8)


def joined(step: int, ranks: Iterable[int] = range(4), unequal: bool = False) -> dict[str, Tensor]:
    """Return one batch of those that these ranks have in a step."""
    return join_batches([batch_of(step, rank, unequal) for rank in ranks])


def fit(
    kind: type,
    name: str,
    options: dict[str, Any],
    groups: dict[str, int],
    unequal: bool = False,
    **trainer_values: Any,
) -> dict[str, Any]:
    """Train in groups; return the state on rank 0, and what this rank has after the fit."""
    rank = rank_and_num_ranks()[0]
    model = seeded(kind, *OPTIMIZERS[name])
    trainer = make_trainer(options | {"sharding_groups": {"size": 2} | groups}, **trainer_values)
    batches = [batch_of(step, rank, unequal) for step in range(STEPS)]
    evaluated = [batch_of(STEPS, rank)] if kind is EvaluatedModel else None
    trainer.fit(
        model,
        DataLoader(batches, batch_size=None),
        evaluated and DataLoader(evaluated, batch_size=None),
    )
    tables = sharded_tables_of(model)
    assert tables is not None
    shards = {
        name: [s.tensor.detach().clone() for s in w.local_shards()]
        for name, w in tables.weights().items()
    }
    shards["mlp"] = [
        p.detach().clone() for p in model.mlp.parameters() if not isinstance(p, DTensor)
    ]
    scores = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {"state": model.final_state, "shards": shards, "scores": scores}


class ByHand(ClickModel):
    """Steps at every third batch, after two backward passes for each."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        step_by_hand(self, self.optimizers(), self.manual_backward, batch, batch_idx)


def step_by_hand(
    model: Any, optimizer: Any, backward: Any, batch: dict[str, Tensor], index: int
) -> None:
    for scale in (1.0, 0.3):
        backward(scale * loss_of(model, batch))
    if index % 3 == 2:
        optimizer.step()
        optimizer.zero_grad()


class Unfrozen(ClickModel):
    """Lets one table learn for two steps between two synchronisations."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        unfreeze(self, 0)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        unfreeze(self, batch_idx)


class UsedInPart(SequenceModel):
    """Leaves one table out in the second group, as a branch by data may; `group` is set where there
    are no ranks."""

    group: int | None = None

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        group = rank_and_num_ranks()[0] // 2 if self.group is None else self.group
        rows = self.ebc(
            KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        )
        bags = [
            _mean(rows[name].values(), rows[name].lengths()) for name in FEATURES[: 4 - 2 * group]
        ]
        bags += [torch.zeros_like(bags[0])] * (4 - len(bags))
        return self.mlp(self.first(torch.cat(bags, 1))).squeeze(-1)


def unfreeze(model: Any, step: int) -> None:
    model.ebc.embedding_bags["wide"].weight.requires_grad_(step in (3, 4))


def call(*args: Any, **options: Any) -> tuple[Any, ...]:
    return (_fit, args, options)


def _fit(args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    return fit(*args, **copy.deepcopy(options))


AT_ONCE = {"prefetch": {"depth": 1}}
EXACT: dict[str, tuple[Any, ...]] = {
    "Adagrad": call(ClickModel, "Adagrad", EVERY_TYPE, {}),
    "Adam": call(ClickModel, "Adam", EVERY_TYPE, {}),
    "RowWiseAdagrad": call(ClickModel, "RowWiseAdagrad", BY_ROWS, {}),
    "sequences": call(SequenceModel, "SGD", {}, {}),
    "learned weights": call(PositionWeighted, "SGD", EVERY_TYPE, {}),
    "groups of one": call(ClickModel, "SGD", {}, {"size": 1}),
    "not prefetched": call(ClickModel, "Adagrad", EVERY_TYPE | AT_ONCE, {}),
    "unequal": call(ClickModel, "SGD", EVERY_TYPE, {}, unequal=True),
    "unequal, not prefetched": call(ClickModel, "SGD", EVERY_TYPE | AT_ONCE, {}, unequal=True),
    "clipped": call(ClickModel, "SGD", EVERY_TYPE, {}, gradient_clip_val=LIMIT),
    "dense layers sharded": call(ClickModel, "SGD", EVERY_TYPE | {"dense": "fsdp"}, {}),
    "used in part": call(UsedInPart, "Adam", {}, {}),
    "gathered": call(ClickModel, "Adagrad", {"tables": {"wide": {"gathered_weight": True}}}, {}),
    "by hand": call(ByHand, "SGD", EVERY_TYPE, {}),
    "accumulated": call(ClickModel, "SGD", EVERY_TYPE, {}, accumulate_grad_batches=2),
}
AVERAGED: dict[str, tuple[Any, ...]] = {
    "Adagrad": call(ClickModel, "Adagrad", EVERY_TYPE, {"sync_interval": 3}),
    "Adam": call(ClickModel, "Adam", EVERY_TYPE, {"sync_interval": 3}),
    "RowWiseAdagrad": call(ClickModel, "RowWiseAdagrad", BY_ROWS, {"sync_interval": 3}),
    "clipped": call(ClickModel, "SGD", EVERY_TYPE, {"sync_interval": 3}, gradient_clip_val=LIMIT),
    "used in part": call(UsedInPart, "Adam", {}, {"sync_interval": 3}),
    "norm below a maximum": call(
        *(ClickModel, "Adagrad", EVERY_TYPE, {"sync_interval": 3}),
        callbacks=[NormalizeRows([WIDE, WIDE.replace("wide", "narrow")], max_norm=0.4)],
    ),
    "unfrozen": call(Unfrozen, "Adam", EVERY_TYPE, {"sync_interval": 3}),
    "validated": call(
        EvaluatedModel, "Adagrad", EVERY_TYPE, {"sync_interval": 3}, val_check_interval=4
    ),
}
RUNS = {
    **{f"exact {name}": run for name, run in EXACT.items()},
    **{f"averaged {name}": run for name, run in AVERAGED.items()},
}
EXACT_RUNS, AVERAGED_RUNS = (
    [name for name in RUNS if name.startswith(kind)] for kind in ("exact", "averaged")
)
QUICK = ("exact Adagrad", "exact unequal, not prefetched")
QUICK_AVERAGED = ("averaged Adagrad", "averaged validated")


@pytest.fixture(scope="module")
def actual(request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """What each rank has after each run that a test of this session asks for."""
    module_values = [item for item in request.session.items if item.path == request.path]
    requested = {
        item.callspec.params.get("run") for item in module_values if hasattr(item, "callspec")
    }
    rank_results = run_each_on_ranks(
        {name: run for name, run in RUNS.items() if name in requested}, 4
    )
    return {name: [rank_result[name] for rank_result in rank_results] for name in rank_results[0]}


def train_plain(run: str) -> State:
    """Train by a plain loop over the batches of all ranks, as this run does."""
    _, (kind, name, *_), options = RUNS[run]
    model = seeded(kind, *OPTIMIZERS[name])
    optimizer = model.configure_optimizers()
    if kind is ByHand:
        for step in range(STEPS):
            step_by_hand(model, optimizer, Tensor.backward, joined(step), step)
        return model.state_dict()
    every = options.get("accumulate_grad_batches", 1)
    for step in range(STEPS):
        for group, ranks in enumerate(GROUPS) if kind is UsedInPart else [(0, range(4))]:
            model.group = group
            share = (2 if kind is UsedInPart else 1) * every
            (loss_of(model, joined(step, ranks, options.get("unequal", False))) / share).backward()
        if (step + 1) % every and step + 1 < STEPS:
            continue
        if "gradient_clip_val" in options:
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("run", slow_except(QUICK, EXACT_RUNS))
def test_groups_that_exchange_gradients_train_as_one_process(
    run: str, actual: dict[str, Any]
) -> None:
    differences = largest_difference(actual[run][0]["state"], train_plain(run))
    assert max(differences.values()) <= limit_of(RUNS[run][1][1]), differences


@pytest.mark.parametrize("run", slow_except(QUICK + QUICK_AVERAGED, RUNS))
def test_replicas_are_equal_to_the_bit_after_a_fit(run: str, actual: dict[str, Any]) -> None:
    for local, remote in ((0, 2), (1, 3)):
        for name, shards in actual[run][local]["shards"].items():
            for first, other in zip(shards, actual[run][remote]["shards"][name], strict=True):
                assert torch.equal(first, other), name


def train_apart(run: str, synchronized: Container[int], scored: int = 0) -> tuple[State, float]:
    """Train two copies by a plain loop, tables each on half of the batch, other layers on all of
    it.

    synchronized: steps after which tables are averaged. scored: after which the loss of the batch
    after the last is taken. Returns the state, and that loss.
    """
    _, (kind, name, *_), options = RUNS[run]
    models = [seeded(kind, *OPTIMIZERS[name]) for _ in GROUPS]
    optimizers = [model.configure_optimizers() for model in models]
    for group, model in enumerate(models):
        model.group = group
    score = 0.0
    for step in range(STEPS):
        for model, optimizer, ranks in zip(models, optimizers, GROUPS, strict=True):
            optimizer.zero_grad()
            if kind is Unfrozen:
                unfreeze(model, step)
            loss_of(model, joined(step, ranks)).backward()
        for first, other in zip(
            *([p for n, p in m.named_parameters() if "ebc" not in n] for m in models), strict=True
        ):
            first.grad = other.grad = (first.grad + other.grad) / 2
        if "gradient_clip_val" in options:
            clip_by_one_norm(models)
        for optimizer in optimizers:
            optimizer.step()
        if "callbacks" in options:
            for table, model in product(("wide", "narrow"), models):
                scale_rows(model.ebc.embedding_bags[table].weight.detach(), 0.4)
        if step + 1 in synchronized:
            average(models, optimizers)
        if step + 1 == scored:
            score = float(loss_of(models[0], joined(STEPS)))
    return models[0].state_dict(), score


def clip_by_one_norm(models: list[ClickModel]) -> None:
    """Scale the gradients of both copies by one factor, of the mean of their squares."""
    squares = torch.stack([
        p.grad.square().sum() for model in models for p in model.parameters()
    ]).sum() / len(models)
    factor = (LIMIT / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    for gradient in {id(p.grad): p.grad for model in models for p in model.parameters()}.values():
        gradient.mul_(factor)


@torch.no_grad()
def average(models: list[ClickModel], optimizers: list[Any]) -> None:
    """Replace tables and their optimizer state by their mean."""
    for pair in zip(*(model.ebc.parameters() for model in models), strict=True):
        states = [optimizer.state[part] for optimizer, part in zip(optimizers, pair, strict=True)]
        for state, other in (states, states[::-1]):  # one may have none yet
            for key in other:
                state.setdefault(key, torch.zeros_like(other[key]))
        for tensors in [pair, *(tuple(state[key] for state in states) for key in states[0])]:
            mean = (
                torch.maximum(*tensors) if tensors[0].dim() == 0 else (tensors[0] + tensors[1]) / 2
            )
            for tensor in tensors:
                tensor.copy_(mean)


@pytest.mark.parametrize("run", slow_except(QUICK_AVERAGED, AVERAGED_RUNS))
def test_groups_that_average_rows_train_as_copies_that_train_apart(
    run: str, actual: dict[str, Any]
) -> None:
    validates = "validated" in run
    # A validation synchronises after step 4, and the third step from there on is the last.
    state, score = train_apart(run, (3, 4, 7) if validates else (3, 6, 7), scored=4 * validates)
    limit = limit_of(RUNS[run][1][1])
    differences = largest_difference(actual[run][0]["state"], state)
    assert max(differences.values()) <= limit, differences
    if validates:
        assert actual[run][0]["scores"]["val_loss"] == pytest.approx(score, abs=1e-5)
    assert max(largest_difference(train_plain(run), state).values()) > 10 * limit, (
        "a warning says that it is inexact"
    )


def in_groups(*types: str, interval: int = 1, size: int = 2) -> dict[str, Any]:
    """Return the strategy's options for three tables of these sharding types, in groups."""
    tables: dict[str, Any] = {}
    for table, kind in zip(("wide", "narrow", "shared"), types, strict=True):
        tables[table] = {
            "sharding_types": [kind],
            **({"min_partition": 4} if kind == "column_wise" else {}),
        }
    return {"tables": tables, "sharding_groups": {"size": size, "sync_interval": interval}}


MIDDLE = ("on_train_batch_end", 8)
RW, TW, CW = "row_wise", "table_wise", "column_wise"
ADAM = (torch.optim.Adam, {"lr": 0.01})
ELSEWHERE = (
    (2, {"strategy": {}}),
    (2, {"strategy": in_groups(TW, TW, TW, size=1)}),
    (4, {"strategy": {"sharding_types": [RW]}}),
)
LIVES = {
    "averaged": Life(Run(strategy=in_groups(RW, CW, TW, interval=3), save=MIDDLE), 4, ((4, {}),)),
    "exact": Life(
        Run(strategy=in_groups(RW, CW, TW)),
        4,
        ((4, {"strategy": in_groups(CW, TW, RW)}), *ELSEWHERE),
    ),
    "exact, Adam": Life(
        Run(optimizer=ADAM, strategy=in_groups(RW, CW, TW), save=MIDDLE), 4, ELSEWHERE
    ),
    "to groups": Life(Run(strategy={}), 2, ((4, {"strategy": in_groups(RW, CW, TW)}),)),
}


@pytest.mark.parametrize("name", slow_except(["averaged"], LIVES))
def test_a_run_resumes_with_and_without_groups(name: str) -> None:
    """One that is saved between two synchronisations is made equal first, and counts from there."""
    assert problems_of(LIVES[name], live({name: LIVES[name]})[name]) == []


def fit_stopped(folder: str, resumes: bool) -> tuple[int, State]:
    """Fit until SIGTERM comes to rank 1 in the fourth step, or resume from what was saved then."""
    rank, num_ranks = rank_and_num_ranks()
    model = seeded(ClickModel, *OPTIMIZERS["Adagrad"])
    options = {"stopping": {"on_sigterm": "checkpoint"}} | (
        {} if resumes else {"sharding_groups": {"size": 1}}
    )
    callbacks = [] if resumes else [Signalled({1: 0.0}, 3, False)]
    trainer = make_trainer(options, callbacks=callbacks, default_root_dir=folder)
    share = range(rank * 4 // num_ranks, (rank + 1) * 4 // num_ranks)
    path = next(Path(folder).rglob("*.ckpt")) if resumes else None
    with nullcontext() if resumes else pytest.raises(SIGTERMException):
        loader = DataLoader([joined(step, share) for step in range(STEPS)], batch_size=None)
        trainer.fit(model, loader, ckpt_path=path)
    return trainer.global_step, model.final_state


@pytest.mark.slow
def test_groups_that_are_stopped_save_what_goes_on_without_groups(tmp_path: Path) -> None:
    stopped = run_on_ranks(fit_stopped, 2, str(tmp_path), False)
    assert len({step for step, _ in stopped}) == 1
    assert 3 < stopped[0][0] < STEPS
    step, state = run_on_ranks(fit_stopped, 2, str(tmp_path), True)[0]
    assert step == STEPS
    expected = train_plain("exact Adagrad")
    assert max(largest_difference(state, expected).values()) <= limit_of("Adagrad")


def count_bytes(interval: int) -> tuple[float, float]:
    """Return what a rank sent to other groups in a step, and the plan's estimate, in the mean over
    ranks."""
    rank = rank_and_num_ranks()[0]
    model = seeded(ClickModel, *OPTIMIZERS["Adagrad"])
    groups = {"size": 2, "sync_interval": interval}
    counted = Communication()
    options = {
        "sharding_groups": groups,
        "batch_size_per_rank": 8,
        "tables": {"*": {"pooling_factor": 2}},
    }
    trainer = make_trainer(options, callbacks=[counted])
    plans = []
    model.on_train_start = lambda: plans.append(trainer.strategy.run_tables.plan)  # type: ignore[method-assign]
    trainer.fit(model, DataLoader([batch_of(step, rank) for step in range(13)], batch_size=None))
    return counted.mean_bytes_per_step["replicas of tables"], float(plans[0].replica_bytes.mean())


@pytest.mark.parametrize("interval", slow_except([1], [1, 3]))
def test_the_plan_estimates_what_groups_send_to_each_other(interval: int) -> None:
    for sent, estimated in run_on_warm_ranks(count_bytes, 4, interval):
        assert estimated == pytest.approx(sent, rel=0.25)


def fit_again() -> tuple[State, list[float]]:
    """Fit one module in groups, without them, in others, and evaluate it; return what rank 0 has,
    and the scores."""
    rank = rank_and_num_ranks()[0]
    model = seeded(EvaluatedModel, *OPTIMIZERS["SGD"])
    batches, last = [batch_of(step, rank) for step in range(STEPS)], [batch_of(STEPS, rank)]
    for size in (2, None, 1):
        make_trainer({"sharding_groups": {"size": size}}).fit(
            model, DataLoader(batches, batch_size=None)
        )
    loader = DataLoader(last, batch_size=None)
    scores = [
        make_trainer({"sharding_groups": {"size": size}}).test(model, loader, verbose=False)[0][
            "val_loss"
        ]
        for size in (1, 2, None)
    ]
    return model.final_state, scores


@pytest.mark.slow
def test_a_module_goes_from_groups_to_one_and_to_others() -> None:
    model = seeded(ClickModel, *OPTIMIZERS["SGD"])
    optimizer = model.configure_optimizers()
    for step in 3 * list(range(STEPS)):
        optimizer.zero_grad()
        loss_of(model, joined(step)).backward()
        optimizer.step()
    rank_results = run_on_warm_ranks(fit_again, 4)
    assert max(largest_difference(rank_results[0][0], model.state_dict()).values()) <= limit_of(
        "SGD"
    )
    for _, scores in rank_results:
        assert scores == pytest.approx([float(loss_of(model, joined(STEPS)))] * 3, abs=1e-5)


SIZE_2 = {"sharding_groups": {"size": 2}}
AT_3 = {"sharding_groups": {"size": 2, "sync_interval": 3}}
INCREMENTAL = {"checkpoint": {"incremental": {"every": 2, "full_every": 4}}}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "divisor": (
        {"sharding_groups": {"size": 3}},
        "ConfigError: sharding_groups: size=3 does not divide the 4 ranks",
    ),
    "fused": (
        SIZE_2 | {"embedding_update": "fused"},
        "ConfigError: (rank .: )?table 'ebc.wide' is updated inside of",
    ),
    "type": (
        SIZE_2 | {"sharding_types": ["data_parallel"]},
        "PlanError: .*not possible within sharding_groups",
    ),
    "two levels": (
        SIZE_2 | {"sharding_types": ["table_row_wise"]},
        "PlanError: .*not possible within sharding_groups",
    ),
    "replicated": (
        SIZE_2 | {"tables": {"wide": {"replicated": True}}},
        "PlanError: .*within sharding_groups",
    ),
    "gathered": (
        AT_3 | {"tables": {"wide": {"gathered_weight": True}}},
        "ConfigError: .*each group has other weights",
    ),
    "averages": (
        AT_3,
        "ConfigError: (rank .: )?the callback EMAWeightAveraging averages weights "
        "of which each group",
    ),
    "norm 1": (
        AT_3,
        "ConfigError: (rank .: )?NormalizeRows: rows of '.*wide.weight' are to have norm 1",
    ),
    "incremental": (SIZE_2 | INCREMENTAL, "ConfigError: .*'incremental'"),
    "mapped": (
        SIZE_2 | {"tables": {"narrow": {"ids": "dynamic"}}},
        "PlanError: .*each of the sharding_groups",
    ),
    "unequal": (
        {},
        r"ConfigError: sharding_groups: ranks have unequal \(size, sync_interval\): .*Give all the same",
    ),
}


def refuse_each() -> dict[str, str]:
    actual = {}
    for name, (options, _) in REFUSED.items():
        rank = rank_and_num_ranks()[0]
        model = seeded(ClickModel, *OPTIMIZERS["SGD"])
        arguments = (
            {"sharding_groups": {"size": 1 + rank % 2}}
            if name == "unequal"
            else copy.deepcopy(options)
        )
        try:
            callbacks = {"averages": [EMAWeightAveraging()], "norm 1": [NormalizeRows([WIDE])]}.get(
                name, []
            )
            make_trainer(arguments, callbacks=callbacks).fit(
                model, DataLoader([batch_of(0, rank)], batch_size=None)
            )
        except Exception as error:
            actual[name] = f"{type(error).__name__}: {error}"
        assert not model.losses
    return actual


def test_what_groups_cannot_be_is_refused_on_every_rank_before_the_first_step() -> None:
    for rank_result in run_on_warm_ranks(refuse_each, 4):
        for name, (_, expected) in REFUSED.items():
            assert re.match(expected, rank_result[name], re.DOTALL), rank_result[name]


def fit_on_unequal_nodes() -> str:
    """Fit in groups of two, on nodes of three ranks and of one, as torchrun would tell it; return
    the error."""
    rank = rank_and_num_ranks()[0]
    node, local = divmod(rank, 3)
    os.environ.update(
        TORCHELASTIC_RUN_ID="none", LOCAL_RANK=str(local), GROUP_RANK=str(node), WORLD_SIZE="4"
    )
    os.environ.update(GROUP_WORLD_SIZE="2", LOCAL_WORLD_SIZE=str((3, 1)[node]))
    model = seeded(ClickModel, *OPTIMIZERS["SGD"])
    strategy = TorchRecShardedStrategy(sharding_groups={"size": 2})
    try:
        trainer = pl.Trainer(strategy=strategy, **DEFAULTS)
        trainer.fit(model, DataLoader([batch_of(0, rank)], batch_size=None))
    except ConfigError as error:
        assert not model.losses
        return str(error)
    return ""


def test_groups_that_lie_on_their_nodes_differently_are_refused() -> None:
    for message in run_on_ranks(fit_on_unequal_nodes, 4):  # new ones: a process keeps its place
        assert (
            "size=2 makes groups that lie on unequal numbers of ranks of their nodes (the nodes "
            "have 3, 1" in message
        )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"size": 0}, "size=0 must be a whole number above 0"),
        ({"size": 2, "sync_interval": 0}, "sync_interval=0 must be a whole number above 0"),
        ({"size": 2, "sync_interval": 1.5}, "sync_interval=1.5: must be a whole number"),
        ({"sync_interval": 3}, "sync_interval=3 needs a size"),
        ({"sizes": 3}, "sharding_groups: there is no option 'sizes'; did you mean 'size'"),
    ],
)
def test_what_the_options_cannot_be(arguments: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        TorchRecShardedStrategy(sharding_groups=arguments)


@pytest.mark.slow
def test_a_yaml_trains_in_groups(tmp_path: Path) -> None:
    options = {
        "class_path": "lightning_distrec.TorchRecShardedStrategy",
        "init_args": copy.deepcopy(AT_3),
    }
    trainer = {
        "strategy": options,
        "devices": 4,
        "max_epochs": 1,
        "limit_train_batches": 4,
        "limit_val_batches": 1,
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"trainer": trainer}))
    data = f"--data.init_args.cache_dir={Path(__file__).parents[3] / 'data' / 'movielens-100k'}"
    configs = [
        "--config",
        "recipes/movielens_dlrm/cpu.yaml",
        "--config",
        str(tmp_path / "job.yaml"),
    ]
    done = fit_by_console(*configs, data, f"--trainer.logger.init_args.save_dir={tmp_path}")
    assert "Embedding tables over 2 ranks in each of 2 groups" in done.stdout
    assert "sync_interval=3 is not exact" in done.stderr
