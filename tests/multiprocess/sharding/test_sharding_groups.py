"""Tables that are sharded within groups of ranks, each with a replica: exact at sync_interval=1, or
with a warning."""

import os
from collections.abc import Container, Iterable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from lightning_distrec import Communication, NormalizeRows, TorchRecShardedStrategy
from lightning_distrec.callbacks.table_callbacks import scale_rows
from lightning_distrec.errors import ConfigError
from lightning_distrec.sharding.sharded_tables import sharded_tables_of
from tests.support.cases import (
    Case,
    Outcome,
    check,
    check_refused,
    click_case,
    run_case,
    run_in_one_process,
)
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
from tests.support.parameters import slow_except
from tests.support.plain_loop import OPTIMIZERS, State, loss_of
from tests.support.ranks import rank_and_num_ranks, run_on_ranks, run_on_warm_ranks
from tests.support.resuming import Life, Run, live, problems_of
from tests.support.trainers import DEFAULTS, make_trainer

EVERY_TYPE: dict[str, Any] = {
    "wide": {"sharding_types": ["row_wise"]},
    "narrow": {"sharding_types": ["column_wise"], "min_partition": 4},
    "shared": {"sharding_types": ["table_wise"]},
}
STEPS = 7
GROUPS = (range(2), range(2, 4))
WIDE = "ebc.embedding_bags.wide.weight"


def group_batch(step: int, rank: int) -> dict[str, Tensor]:
    """Return a batch that says whose it is."""
    return make_batch(1000 * step + rank) | {"group": torch.tensor(rank // 2)}


def unequal_batch(step: int, rank: int) -> dict[str, Tensor]:
    return make_batch(1000 * step + rank, 8 - 2 * rank)


def joined(step: int, ranks: Iterable[int] = range(4)) -> dict[str, Tensor]:
    """Return one batch of those that these ranks have in a step."""
    batches = [group_batch(step, rank) for rank in ranks]
    return join_batches(batches) | {"group": batches[0]["group"]}


def shards(trainer: pl.Trainer) -> dict[str, list[Tensor]]:
    """Return this rank's shards of tables, and the weights of layers that every rank has whole."""
    model = trainer.lightning_module
    tables = sharded_tables_of(model)
    assert tables is not None
    actual = {
        name: [shard.tensor.detach().clone() for shard in weight.local_shards()]
        for name, weight in tables.weights().items()
    }
    whole = [weight for weight in model.mlp.parameters() if not isinstance(weight, DTensor)]
    return actual | {"mlp": [weight.detach().clone() for weight in whole]}


class UsedInPart(SequenceModel):
    """Leaves one table out in the second group, as a branch by data may."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(FEATURES, batch["ids"], lengths=batch["lengths"])
        rows = self.ebc(features)
        names = FEATURES[: 4 - 2 * int(batch["group"])]
        bags = [_mean(rows[name].values(), rows[name].lengths()) for name in names]
        bags += [torch.zeros_like(bags[0])] * (4 - len(bags))
        return self.mlp(self.first(torch.cat(bags, 1))).squeeze(-1)


def case(kind: type = ClickModel, optimizer: str = "SGD", interval: int = 1, **values: Any) -> Case:
    """Return a case in groups of two of four ranks."""
    options = values.pop("strategy", {"tables": EVERY_TYPE})
    size = values.pop("size", 2)
    groups = {"sharding_groups": {"size": size, "sync_interval": interval}}
    fields = {"batch": group_batch, "steps": STEPS, "num_ranks": 4, "look": shards}
    return click_case(kind, optimizer, strategy=options | groups, **fields | values)


AT_ONCE = {"tables": EVERY_TYPE, "prefetch": {"depth": 1}}
BY_ROWS = {"sharding_types": ["table_wise", "row_wise"]}
EXACT = {
    # Of SGD, since Adagrad and Adam make nearly the same updates of gradients twice as large.
    "unequal, not prefetched": case(batch=unequal_batch, strategy=AT_ONCE, loss_limit=None),
    "Adam": case(optimizer="Adam"),
    "RowWiseAdagrad": case(optimizer="RowWiseAdagrad", strategy=BY_ROWS),
    "sequences": case(SequenceModel, strategy={}),
    "clipped": case(trainer={"gradient_clip_val": 0.05}),
    "dense layers sharded": case(strategy={"tables": EVERY_TYPE, "dense": "fsdp"}),
    "used in part": case(UsedInPart, "Adam", strategy={}, join=None),
    "gathered": case(optimizer="Adagrad", strategy={"tables": {"wide": {"gathered_weight": True}}}),
}
AVERAGED = {
    "validated": case(EvaluatedModel, "Adagrad", 3, val_steps=1, trainer={"val_check_interval": 4}),
    "Adam": case(optimizer="Adam", interval=3),
    "RowWiseAdagrad": case(optimizer="RowWiseAdagrad", interval=3, strategy=BY_ROWS),
    "used in part": case(UsedInPart, "Adam", 3, strategy={}, join=None),
    "norm below a maximum": case(
        optimizer="Adagrad",
        interval=3,
        trainer={"callbacks": [NormalizeRows([WIDE], max_norm=0.4)]},
    ),
}


def assert_replicas_are_equal(outcomes: list[Outcome]) -> None:
    for local, remote in ((0, 2), (1, 3)):
        for name, parts in outcomes[local].seen.items():
            for first, other in zip(parts, outcomes[remote].seen[name], strict=True):
                assert torch.equal(first, other), name


@pytest.mark.parametrize("name", slow_except(list(EXACT)[:1], EXACT))
def test_groups_that_exchange_gradients_train_as_one_process(name: str) -> None:
    assert_replicas_are_equal(check(EXACT[name]))


def train_apart(case: Case, synchronized: Container[int], scored: int = 0) -> tuple[State, float]:
    """Train two copies by a plain loop, tables each on half of the batch, other layers on all of
    it.

    synchronized: steps after which tables are averaged. scored: after which the loss of the batch
    after the last is taken. Returns the state, and that loss.
    """
    models = [seeded(case.module) for _ in GROUPS]
    optimizers = [model.configure_optimizers() for model in models]
    score = 0.0
    for step in range(STEPS):
        for model, optimizer, ranks in zip(models, optimizers, GROUPS, strict=True):
            optimizer.zero_grad()
            loss_of(model, joined(step, ranks)).backward()
        for first, other in zip(
            *([p for n, p in m.named_parameters() if "ebc" not in n] for m in models), strict=True
        ):
            first.grad = other.grad = (first.grad + other.grad) / 2
        for optimizer in optimizers:
            optimizer.step()
        if "callbacks" in case.trainer:
            for model in models:
                scale_rows(model.ebc.embedding_bags["wide"].weight.detach(), 0.4)
        if step + 1 in synchronized:
            average(models, optimizers)
        if step + 1 == scored:
            score = float(loss_of(models[0], joined(STEPS)))
    return models[0].state_dict(), score


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


@pytest.mark.parametrize("name", slow_except(["validated"], AVERAGED))
def test_groups_that_average_rows_train_as_copies_that_train_apart(name: str) -> None:
    case, validates = AVERAGED[name], name == "validated"
    outcomes = run_case(case)
    assert_replicas_are_equal(outcomes)
    # A validation synchronises after step 4, and the third step from there on is the last.
    state, score = train_apart(case, (3, 4, 7) if validates else (3, 6, 7), scored=4 * validates)
    differences = largest_difference(outcomes[0].state, state)
    assert max(differences.values()) <= case.limit, differences
    if validates:
        assert outcomes[0].metrics["val_loss"] == pytest.approx(score, abs=1e-5)
    expected = run_in_one_process(case).state
    assert max(largest_difference(expected, state).values()) > 10 * case.limit, (
        "a warning says that it is inexact"
    )


def in_groups(*types: str, interval: int = 1, size: int = 2) -> dict[str, Any]:
    """Return the strategy's options for three tables of these sharding types, in groups."""
    tables = {
        table: {"sharding_types": [kind], "min_partition": 4}
        for table, kind in zip(("wide", "narrow", "shared"), types, strict=True)
    }
    return {"tables": tables, "sharding_groups": {"size": size, "sync_interval": interval}}


MIDDLE = ("on_train_batch_end", 8)
RW, TW, CW = "row_wise", "table_wise", "column_wise"
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
    "to groups": Life(Run(strategy={}), 2, ((4, {"strategy": in_groups(RW, CW, TW)}),)),
}


@pytest.mark.parametrize("name", slow_except(["averaged"], LIVES))
def test_a_run_resumes_with_and_without_groups(name: str) -> None:
    """One that is saved between two synchronisations is made equal first, and counts from there."""
    assert problems_of(LIVES[name], live({name: LIVES[name]})[name]) == []


def count_bytes() -> tuple[float, float]:
    """Return what a rank sent to other groups in a step, and the plan's estimate, in the mean over
    ranks."""
    rank = rank_and_num_ranks()[0]
    model = seeded(ClickModel, *OPTIMIZERS["Adagrad"])
    groups = {"size": 2, "sync_interval": 1}
    counted = Communication()
    options = {
        "sharding_groups": groups,
        "batch_size_per_rank": 8,
        "tables": {"*": {"pooling_factor": 2}},
    }
    trainer = make_trainer(options, callbacks=[counted])
    plans = []
    model.on_train_start = lambda: plans.append(trainer.strategy.run_tables.plan)  # type: ignore[method-assign]
    trainer.fit(model, DataLoader([group_batch(step, rank) for step in range(13)], batch_size=None))
    return counted.mean_bytes_per_step["replicas of tables"], float(plans[0].replica_bytes.mean())


def test_the_plan_estimates_what_groups_send_to_each_other() -> None:
    for sent, estimated in run_on_warm_ranks(count_bytes, 4):
        assert estimated == pytest.approx(sent, rel=0.25)


def strategy_of_rank(rank: int) -> dict[str, Any]:
    return {"sharding_groups": {"size": 1 + rank % 2}}


def averages() -> dict[str, Any]:
    return {"callbacks": [EMAWeightAveraging()]}


INCREMENTAL = {"checkpoint": {"incremental": {"every": 2, "full_every": 4}}}
GATHERED = {"tables": {"wide": {"gathered_weight": True}}}
NORM_1 = {"callbacks": [NormalizeRows([WIDE])]}
REFUSED: dict[str, tuple[Case, str]] = {
    "divisor": (case(size=3), "ConfigError: sharding_groups: size=3 does not divide the 4 ranks"),
    "fused": (
        case(strategy={"embedding_update": "fused"}),
        "table 'ebc.wide' is updated inside of",
    ),
    "two levels": (
        case(strategy={"sharding_types": ["table_row_wise"]}),
        "not possible within sharding_groups",
    ),
    "gathered": (case(interval=3, strategy=GATHERED), "each group has other weights"),
    "averages": (
        case(interval=3, trainer=averages),
        "the callback EMAWeightAveraging averages weights of which each group",
    ),
    "norm 1": (case(interval=3, trainer=NORM_1), "are to have norm 1"),
    "incremental": (case(strategy=INCREMENTAL), "'incremental'"),
    "mapped": (
        case(strategy={"tables": {"narrow": {"ids": "dynamic"}}}),
        "each of the sharding_groups",
    ),
    "unequal": (
        click_case(ClickModel, num_ranks=4, strategy=strategy_of_rank),
        "ConfigError: sharding_groups: ranks have unequal (size, sync_interval): ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_groups_cannot_be_is_refused_on_every_rank(name: str) -> None:
    check_refused(*REFUSED[name], started=0)


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
        trainer.fit(model, DataLoader([group_batch(0, rank)], batch_size=None))
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
