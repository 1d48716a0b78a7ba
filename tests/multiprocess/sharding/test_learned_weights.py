"""Weights of ids that learn, in feature processors or layers of the user, get the gradients of one
process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support.cases import Case, check, check_refused, click_case
from tests.support.click_model import (
    ClickModel,
    join_batches,
    largest_difference,
    make_batch,
    rank_loader,
    seeded,
)
from tests.support.plain_loop import EVERY_CUT, OPTIMIZERS, global_batches, limit_of, train_plain
from tests.support.ranks import (
    rank_and_num_ranks,
    run_each_on_ranks,
    run_on_warm_ranks,
)
from tests.support.trainers import make_trainer
from tests.support.weighted_models import (
    Evaluated,
    FreezesBeforeBackward,
    FreezesProcessors,
    FreezesTables,
    LooksUpTwice,
    PositionWeighted,
    RanksDisagree,
    SharesBags,
    WeightsOfALayer,
)

STEPS = 4
ALL: dict[str, Any] = {"convert_embeddings": "all"}


def case(
    kind: type[ClickModel],
    /,
    optimizer: str = "SGD",
    cut: str | dict[str, Any] = "row_wise",
    update: str = "",
    **values: Any,
) -> Case:
    """Return a case of tables that are all cut in this way."""
    strategy = ALL | (cut if isinstance(cut, dict) else {"sharding_types": [cut]})
    strategy |= {"embedding_update": update} if update else {}
    return click_case(kind, optimizer, **{"strategy": strategy, "steps": STEPS} | values)


FROZEN_LATER = {"find_unused_parameters": True}
CASES = {
    "together, data-parallel": case(
        PositionWeighted, cut="data_parallel", told=("_embedding_bag_collection",)
    ),
    "by feature, every cut, three ranks": case(
        PositionWeighted, "Adagrad", EVERY_CUT, kind="by feature", num_ranks=3
    ),
    "a layer, table-wise, three ranks": case(WeightsOfALayer, "SGD", "table_wise", num_ranks=3),
    "a layer, every cut": case(WeightsOfALayer, "Adam", EVERY_CUT),
    "shared bags": case(SharesBags, "SGD", "row_wise", "sparse", join=None, rests=("bag.weight",)),
    "tables frozen later": case(FreezesTables, update="sparse"),
    "processors frozen later": case(FreezesProcessors, strategy=FROZEN_LATER, steps=8),
}


@pytest.mark.parametrize("name", CASES)
def test_weights_that_learn_get_the_gradients_of_one_process(name: str) -> None:
    check(CASES[name])


REFUSED = {
    "tables frozen later": (case(FreezesTables, strategy={}), "is frozen, "),
    "a layer frozen on one rank, by hand": (
        case(FreezesBeforeBackward, strategy=ALL | {"embedding_update": "sparse"}),
        "was called with ids whose weights need a gradient on ranks [0] of 2, and on no other",
    ),
    "two lookups": (
        case(LooksUpTwice, strategy=ALL | {"embedding_update": "fused"}),
        "more than one lookup of",
    ),
    "ranks that disagree": (
        case(RanksDisagree, strategy=ALL),
        "weights of any type that need a gradient; rank 1: ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_other_numbers_is_refused_on_every_rank(name: str) -> None:
    check_refused(*REFUSED[name])


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
    resumed = run_on_warm_ranks(_resume, 3, path)[0]
    expected = _train_two_epochs(3)
    assert max(largest_difference(resumed, expected).values()) <= limit_of("Adagrad")


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
    trainer = make_trainer(ALL | {"prefetch": {"depth": depth}})
    trainer.fit(model, loader, loader)
    return model.final_state, model.found


def test_ids_are_prefetched_and_weights_of_this_step_follow_them() -> None:
    calls = {"ahead": (_fit_ahead, 3), "as called": (_fit_ahead, 1)}
    for actual in run_each_on_ranks(calls, 2):
        (ahead, validated), (as_called, reference) = actual["ahead"], actual["as called"]
        assert all(torch.equal(ahead[key], as_called[key]) for key in as_called)
        assert validated[:-2] == reference
        assert len(reference) == 6
        assert validated[-2:] == [("training 0", 12, 10), ("validation 0", 12, 10)]
