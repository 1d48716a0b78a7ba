"""Batches that do not fit: an error of ours on every rank before ids leave it, or the numbers of
one process."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_distrec.errors import DistRecError
from tests.support.click_model import EvaluatedModel, make_batch, seeded
from tests.support.embedding_models import loader
from tests.support.malformed_batches import (
    STRATEGY,
    EveryKind,
    draw_cases,
    good,
    with_weights_of_the_tables_type,
)
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

Batch = dict[str, Tensor]


class LooksUpEach(EveryKind):
    """Looks up malformed batches one after the other before it trains."""

    def __init__(self, seed: int, number: int) -> None:
        super().__init__()
        self.cases = (seed, number)
        self.results: dict[str, Any] = {}

    def on_train_start(self) -> None:
        rank, num_ranks = rank_and_num_ranks()
        unsharded = seeded(EveryKind)
        for kind, name, rank_results in draw_cases(*self.cases, num_ranks):
            try:
                with torch.no_grad():
                    values = self.look_up(kind, copy.deepcopy(rank_results[rank]))
            except DistRecError as error:
                self.results[name] = f"{type(error).__name__}: {error}"
                continue
            except Exception as error:
                self.results[name] = AssertionError(f"no error of ours: {error!r}")
                continue
            with torch.no_grad():
                try:
                    expected = unsharded.look_up(
                        kind, with_weights_of_the_tables_type(rank_results[rank])
                    )
                except Exception as error:
                    self.results[name] = AssertionError(f"one process raises {error!r}")
                    continue
            is_equal = values.shape == expected.shape and torch.allclose(
                values, expected, atol=1e-6
            )
            self.results[name] = is_equal or f"{values} for {expected}"


def _look_up_each(seed: int, number: int) -> dict[str, Any]:
    model = seeded(LooksUpEach, seed, number)
    batch = {kind: good(kind, torch.Generator().manual_seed(0)) for kind in ("by_table", "item")}
    make_trainer(STRATEGY).fit(model, loader([batch]))
    return model.results


def _check(seed: int, number: int, num_ranks: int) -> None:
    rank_results = run_on_warm_ranks(_look_up_each, num_ranks, seed, number)
    num_errors = 0
    for name in rank_results[0]:
        actual = [rank_result[name] for rank_result in rank_results]
        if isinstance(actual[0], str):
            num_errors += 1
            assert all(isinstance(rank_result, str) for rank_result in actual), (name, actual)
            assert all(name.split(":")[0] in rank_result for rank_result in actual), (name, actual)
        else:
            assert all(rank_result is True for rank_result in actual), (name, actual)
    assert 100 < num_errors < len(rank_results[0])


_ONE_MORE_ONE_LESS = (torch.arange(32) == 3).long() - (torch.arange(32) == 20).long()
CHANGES: dict[str, tuple[Callable[[Batch], Batch], str]] = {
    "a length too large": (
        lambda batch: batch | {"lengths": batch["lengths"] + (torch.arange(32) == 3)},
        r"'ebc' has \d+ ids, but its lengths add up to \d+ \('a': \d+, 'b': ",
    ),
    "lengths of the right sum": (
        lambda batch: batch | {"lengths": batch["lengths"] + 9 * _ONE_MORE_ONE_LESS},
        r"'ebc' has a bag of -\d ids\.",
    ),
    "short weights": (
        lambda batch: batch | {"weights": batch["weights"][:-1]},
        r"'ebc' has \d+ ids, and weights of torch.float32 and shape",
    ),
    "float ids": (
        lambda batch: batch | {"ids": batch["ids"].float()},
        r"'ebc' has ids of torch.float32 and shape \(\d+,\)\. They must be int64 or int32",
    ),
    "other types": (
        lambda batch: batch | {"lengths": batch["lengths"].int()},
        "ranks called 'ebc' with .* rank 0: .*lengths of torch.int64, weights of torch.float32; "
        "rank 1: .*torch.int32",
    ),
}


class GetsBadBatch(EvaluatedModel):
    """Gets a bad batch on one rank."""

    change = ""

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return CHANGES[self.change][0](batch) if batch.pop("bad", None) is not None else batch


def _run_stage(stage: str, change: str, depth: int) -> tuple[str, int]:
    """Return what was raised, and the number of steps before."""
    rank, _ = rank_and_num_ranks()
    model = seeded(GetsBadBatch, torch.optim.SGD, {"lr": 0.1}, weighted=True)
    model.change = change
    batches = [make_batch(10 * step + rank) for step in range(4)]
    if rank == 1:
        batches[3]["bad"] = torch.ones(1)
    trainer = make_trainer({"prefetch": {"depth": depth}})
    try:
        getattr(trainer, stage)(model, loader(batches))
    except Exception as error:
        return f"{type(error).__name__}: {error}", len(model.losses)
    return "nothing was raised", len(model.losses)


RUNS = [
    ("fit", "a length too large", 3),
    ("fit", "float ids", 3),
    ("fit", "other types", 1),
    ("fit", "other types", 3),
    ("fit", "lengths of the right sum", 3),
    ("predict", "short weights", 3),
]


def test_a_bad_batch_of_one_rank_is_one_error_on_all_ranks_prefetched_or_not() -> None:
    first, second = run_each_on_ranks({str(run): (_run_stage, *run) for run in RUNS}, 2)
    for stage, change, depth in RUNS:
        case = str((stage, change, depth))
        assert first[case] == second[case], case
        message, steps = first[case]
        assert re.search(f"^IdsError: {CHANGES[change][1]}", message), (case, message)
        assert steps == (3 if stage == "fit" else 0), case


def test_a_malformed_batch_gives_the_numbers_of_one_process_or_an_error_of_ours() -> None:
    _check(0, 20, 2)


@pytest.mark.slow
def test_malformed_batches_on_three_ranks() -> None:
    _check(1, 1000, 3)
