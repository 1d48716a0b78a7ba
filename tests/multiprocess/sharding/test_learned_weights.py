"""Weights of ids that learn, in feature processors or layers of the user, get the gradients of one
process."""

import contextlib
import io
import os
import re
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from lightning_distrec import TorchRecShardedStrategy
from tests.support.click_model import (
    ClickModel,
    join_batches,
    largest_difference,
    make_batch,
    rank_loader,
    seeded,
    train_unsharded,
)
from tests.support.embedding_models import train_unsharded as train_by_ranks
from tests.support.parameters import slow_except
from tests.support.plain_loop import EVERY_CUT, OPTIMIZERS, global_batches, limit_of, train_plain
from tests.support.ranks import (
    rank_and_num_ranks,
    run_each_on_ranks,
    run_on_ranks,
    run_on_warm_ranks,
)
from tests.support.trainers import DEFAULTS, make_trainer
from tests.support.weighted_models import (
    CallsDiffer,
    Evaluated,
    FreezesBeforeBackward,
    FreezesProcessors,
    FreezesTables,
    LooksUpTwice,
    PositionWeighted,
    RanksDisagree,
    SharesBags,
    WeightsOfALayer,
    learned_weights,
)

STEPS = 4
MODELS: dict[str, tuple[type[ClickModel], tuple[str, ...]]] = {
    "processors together": (PositionWeighted, ("together",)),
    "processors by feature": (PositionWeighted, ("by feature",)),
    "a layer": (WeightsOfALayer, ()),
}
ALL: dict[str, Any] = {"convert_embeddings": "all"}
CUTS: dict[str, dict[str, Any]] = {
    **{cut: ALL | {"sharding_types": [cut]} for cut in ("table_wise", "row_wise", "data_parallel")},
    "column_wise": ALL | {"sharding_types": ["column_wise"], "tables": {"*": {"min_partition": 4}}},
    "every": ALL | EVERY_CUT,
}
UPDATES = ("SGD", "Adagrad", "Adam", "SGD sparse", "Adagrad dense")
QUICK = [
    *[
        (2, "processors together", "row_wise", "SGD"),
        (3, "processors by feature", "every", "Adagrad"),
    ],
    *[(2, "a layer", "column_wise", "SGD sparse"), (3, "a layer", "table_wise", "SGD")],
    *[(2, "a layer", "every", "Adam"), (2, "processors together", "data_parallel", "SGD")],
]
NOT_SPARSE = ("data_parallel", "every")
ALL_CASES = product((2, 3), MODELS, CUTS, UPDATES)
CASES = [case for case in ALL_CASES if "sparse" not in case[3] or case[2] not in NOT_SPARSE]


def _fit(model: str, cut: str, update: str) -> tuple[list[float], dict[str, Tensor], set[str]]:
    """Return the losses of this rank, the trained state, and the sharding types of the tables."""
    kind, arguments = MODELS[model]
    name, _, mode = update.partition(" ")
    trained = seeded(kind, *OPTIMIZERS[name], *arguments)
    types: set[str] = set()

    def look() -> None:
        types.update(
            item.sharding_type for item in trained.trainer.strategy.run_tables.shards.plan.values()
        )

    trained.on_train_start = look
    strategy = CUTS[cut] | ({"embedding_update": mode} if mode else {})
    make_trainer(strategy).fit(trained, rank_loader(STEPS, rank_and_num_ranks()[0]))
    return trained.losses, trained.final_state, types


@pytest.mark.parametrize(("num_ranks", "model", "cut", "update"), slow_except(QUICK, CASES))
def test_weights_that_learn_get_the_gradients_of_one_process(
    num_ranks: int, model: str, cut: str, update: str
) -> None:
    actual = run_on_warm_ranks(_fit, num_ranks, model, cut, update)
    kind, arguments = MODELS[model]
    name = update.split()[0]
    start = seeded(kind, *OPTIMIZERS[name], *arguments)
    expected = train_unsharded(start, STEPS, num_ranks)
    losses, states, types = zip(*actual, strict=True)
    assert cut == "every" or types[0] == {cut}
    assert torch.allclose(torch.tensor(losses).mean(0), torch.tensor(expected.losses), atol=1e-6)
    assert max(largest_difference(states[0], expected.final_state).values()) <= limit_of(name)
    previous = learned_weights(start.state_dict())
    assert previous
    assert (
        min(
            float((expected.final_state[key] - value).abs().max())
            for key, value in previous.items()
        )
        > 1e-4
    )


def _fit_unequal(cut: str, update: str) -> dict[str, Tensor]:
    model = seeded(SharesBags, *OPTIMIZERS["SGD"])
    trainer = make_trainer(CUTS[cut] | {"embedding_update": update})
    trainer.fit(model, rank_loader(STEPS, rank_and_num_ranks()[0]))
    return model.final_state


def test_weights_of_features_with_unequal_batch_sizes_learn_too() -> None:
    calls = {
        cut: (_fit_unequal, cut, update)
        for cut, update in (("table_wise", "fused"), ("row_wise", "sparse"))
    }
    start = seeded(SharesBags, *OPTIMIZERS["SGD"])
    batches = zip(*[list(rank_loader(STEPS, rank)) for rank in range(2)], strict=True)
    expected = train_by_ranks(start, list(map(list, batches))).state_dict()
    for state in run_each_on_ranks(calls, 2)[0].values():
        assert max(largest_difference(state, expected).values()) <= limit_of("SGD")
    assert (
        min(
            float((expected[key] - item).abs().max())
            for key, item in learned_weights(start.state_dict()).items()
        )
        > 1e-4
    )


def _fit_on_nodes(cut: str, update: str) -> dict[str, Tensor]:
    """Train on a rank of two nodes, as torchrun would tell it."""
    rank, num_ranks = rank_and_num_ranks()
    number, local = divmod(rank, 2)
    os.environ.update(
        TORCHELASTIC_RUN_ID="none",
        LOCAL_RANK=str(local),
        LOCAL_WORLD_SIZE="2",
        GROUP_RANK=str(number),
    )
    os.environ.update(GROUP_WORLD_SIZE="2", WORLD_SIZE=str(num_ranks))
    model = seeded(WeightsOfALayer, *OPTIMIZERS["SGD"])
    options = ALL | {
        "sharding_types": [cut],
        "embedding_update": update,
        "tables": {"*": {"min_partition": 4}},
    }
    strategy = TorchRecShardedStrategy(**options)
    trainer = pl.Trainer(strategy=strategy, devices=2, num_nodes=2, **DEFAULTS)
    trainer.fit(model, rank_loader(STEPS, rank))
    return model.final_state


@pytest.mark.slow
@pytest.mark.parametrize("cut", ["table_row_wise", "table_column_wise"])
def test_weights_learn_on_two_nodes(cut: str) -> None:
    expected = train_unsharded(seeded(WeightsOfALayer, *OPTIMIZERS["SGD"]), STEPS, 4).final_state
    for update in ("fused", "sparse"):
        state = run_on_ranks(_fit_on_nodes, 4, cut, update)[0]
        assert max(largest_difference(state, expected).values()) <= limit_of("SGD")


def _freeze(update: str, later: int) -> tuple[str, dict[str, Tensor]]:
    model = seeded(FreezesTables, *OPTIMIZERS["SGD"], later)
    try:
        make_trainer({"embedding_update": update}).fit(
            model, rank_loader(STEPS, rank_and_num_ranks()[0])
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}", {}
    return "", model.final_state


FREEZING = {
    ("auto", 0): "",
    ("sparse", 2): "",
    ("auto", 2): r"ShardingError: table '.*\.wide' is frozen, .*embedding_update='sparse'",
}


@pytest.fixture(scope="module")
def frozen() -> list[dict[str, Any]]:
    return run_each_on_ranks({str(case): (_freeze, *case) for case in FREEZING}, 2)


@pytest.mark.parametrize("case", FREEZING)
def test_frozen_tables_pass_gradients_to_the_weights_or_are_refused(
    frozen: list[dict[str, Any]], case: tuple[str, int]
) -> None:
    for rank, actual in enumerate(frozen):
        message, state = actual[str(case)]
        assert re.match(FREEZING[case], message, re.DOTALL) if FREEZING[case] else not message, (
            message
        )
        if not message and rank == 0:
            start = seeded(FreezesTables, *OPTIMIZERS["SGD"], case[1])
            expected = _train_freezing(start)
            assert max(largest_difference(state, expected).values()) <= limit_of("SGD")


def _train_freezing(model: FreezesTables) -> dict[str, Tensor]:
    return train_plain(model, global_batches(STEPS), before_batch=model.freeze_tables)


def _freeze_processors() -> dict[str, Tensor]:
    model = seeded(FreezesProcessors, *OPTIMIZERS["SGD"], True)
    make_trainer({"find_unused_parameters": True}).fit(
        model, rank_loader(2 * STEPS, rank_and_num_ranks()[0])
    )
    return model.final_state


def test_a_processor_that_all_ranks_freeze_rests_from_then_on() -> None:
    start = seeded(FreezesProcessors, *OPTIMIZERS["SGD"], True)
    expected = train_plain(start, global_batches(2 * STEPS), before_batch=start.freeze_processors)
    actual = run_on_warm_ranks(_freeze_processors, 2)[0]
    assert max(largest_difference(actual, expected).values()) <= limit_of("SGD")


def _refused(kind: type[ClickModel], strategy: dict[str, Any], *arguments: Any) -> str:
    model = seeded(kind, *OPTIMIZERS["SGD"], *arguments)
    try:
        make_trainer(ALL | strategy).fit(model, rank_loader(STEPS, rank_and_num_ranks()[0]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


ON_RANK_0 = r"ShardingError: 'ebc.*' was called with ids whose weights need a gradient on ranks \[0\] of 2, and on no"
REFUSED: dict[str, tuple[type[ClickModel], dict[str, Any], str]] = {
    "a processor frozen on one rank": (FreezesProcessors, {}, ON_RANK_0),
    "a layer frozen on one rank, by hand": (
        FreezesBeforeBackward,
        {"embedding_update": "sparse"},
        ON_RANK_0,
    ),
    "two lookups": (
        LooksUpTwice,
        {"embedding_update": "fused"},
        "OptimizerError: .*more than one lookup of 'e?b",
    ),
    "calls that differ": (
        CallsDiffer,
        {},
        "ProvenanceError: .*'ebc' is called with an input that is not the part",
    ),
    "ranks that disagree": (
        RanksDisagree,
        {},
        "IdsError: .*weights of any type that need a gradient; rank 1: ",
    ),
}


def test_what_would_be_other_numbers_is_refused_on_every_rank() -> None:
    calls = {
        name: (_refused, kind, item, *[False] * ("processor" in name))
        for name, (kind, item, _) in REFUSED.items()
    }
    rank_results = run_each_on_ranks(calls, 2)
    for actual in rank_results:
        for name, (_, _, message) in REFUSED.items():
            assert re.match(message, actual[name], re.DOTALL), actual[name]


def _save(path: str) -> dict[str, Tensor]:
    """Train an epoch and save it; returns the trained state."""
    model = seeded(PositionWeighted, *OPTIMIZERS["Adagrad"])
    trainer = make_trainer()
    trainer.fit(model, rank_loader(STEPS, rank_and_num_ranks()[0]))
    trainer.save_checkpoint(path)
    return model.final_state


def _resume(path: str) -> dict[str, Tensor]:
    """Train another epoch; returns the trained state."""
    model = seeded(PositionWeighted, *OPTIMIZERS["Adagrad"])
    with torch.no_grad():
        model.ebc._feature_processors.position_weights["a"].fill_(7.0)
    make_trainer(max_epochs=2).fit(
        model, rank_loader(STEPS, rank_and_num_ranks()[0]), ckpt_path=path
    )
    return model.final_state


def test_a_feature_processor_is_resumed_with_its_tables_on_more_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "first.ckpt")
    saved = run_on_warm_ranks(_save, 2, path)[0]
    model = seeded(PositionWeighted, *OPTIMIZERS["Adagrad"])
    first = train_plain(model, global_batches(STEPS))
    file = torch.load(path, weights_only=True)["state_dict"]
    assert file.keys() == first.keys()
    assert all(torch.equal(file[key], saved[key]) for key in first)
    for num_ranks in (2, 3):
        resumed = run_on_warm_ranks(_resume, num_ranks, path)[0]
        expected = _train_two_epochs(num_ranks)
        assert max(largest_difference(resumed, expected).values()) <= limit_of("Adagrad"), num_ranks


def _train_two_epochs(num_ranks: int) -> dict[str, Tensor]:
    """Train an epoch of the batches of two ranks, and one of those of `num_ranks`."""
    later = [
        join_batches([make_batch(1000 * step + rank) for rank in range(num_ranks)])
        for step in range(STEPS)
    ]
    return train_plain(
        seeded(PositionWeighted, *OPTIMIZERS["Adagrad"]), [*global_batches(STEPS), *later]
    )


def _fit_ahead(depth: int) -> tuple[dict[str, Tensor], list[Any]]:
    """Return the trained state, and what validation steps have found and how many lookups were
    prefetched."""
    rank, _ = rank_and_num_ranks()
    batches = [make_batch(10 * step + rank) for step in range(6)]
    draw = torch.Generator().manual_seed(rank)
    batches = [
        batch | {"matrix": torch.randint(0, 60, (8, 4), generator=draw)} for batch in batches
    ]
    loader = DataLoader(batches, batch_size=None)
    model = seeded(Evaluated, *OPTIMIZERS["Adagrad"])
    trainer = make_trainer(ALL | {"prefetch": {"depth": depth}}, max_epochs=2)
    trainer.fit(model, loader, loader)
    return model.final_state, model.found


def test_ids_are_prefetched_and_weights_of_this_step_follow_them() -> None:
    calls = {"ahead": (_fit_ahead, 3), "as called": (_fit_ahead, 1)}
    for actual in run_each_on_ranks(calls, 2):
        (ahead, validated), (as_called, reference) = actual["ahead"], actual["as called"]
        assert all(torch.equal(ahead[key], as_called[key]) for key in as_called)
        assert validated[:-2] == reference
        assert len(reference) == 12
        assert validated[-2:] == [("training 0", 24, 20), ("validation 0", 24, 20)]


def _start_table() -> str:
    out = io.StringIO()
    model = seeded(PositionWeighted, *OPTIMIZERS["SGD"])
    with contextlib.redirect_stdout(out):
        make_trainer().fit(model, rank_loader(1, rank_and_num_ranks()[0]))
    assert type(model.ebc) is FeatureProcessedEmbeddingBagCollection
    return out.getvalue()


def test_the_start_table_has_the_tables_of_a_feature_processor() -> None:
    shown = run_on_warm_ranks(_start_table, 2)[0]
    assert "_embedding_bag_collection" in shown
    assert "not sharded" not in shown
