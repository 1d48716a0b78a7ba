"""Ranks with unequal numbers of batches stop together, sized or not, in training and evaluation;
nothing hangs."""

import re
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_distrec import TorchRecShardedStrategy, TunedDDPStrategy, TunedFSDPStrategy
from tests.support.click_model import (
    EvaluatedModel,
    make_batch,
    rank_loader,
    seeded,
    train_unsharded,
)
from tests.support.parameters import slow_except
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_on_warm_ranks, words_of_ranks
from tests.support.trainers import DEFAULTS, make_trainer


class Stream(IterableDataset):
    """Batches without a length."""

    def __init__(self, steps: int, rank: int) -> None:
        self.steps, self.rank = steps, rank

    def __iter__(self) -> Iterator[Any]:
        for step in range(self.steps):
            yield make_batch(1000 * step + self.rank)


def _loader(kind: str, lengths: tuple[int, ...]) -> DataLoader:
    rank, _ = rank_and_num_ranks()
    return (
        rank_loader(lengths[rank], rank)
        if kind == "sized"
        else DataLoader(Stream(lengths[rank], rank), batch_size=None)
    )


def _train(kind: str, train: tuple[int, ...], val: tuple[int, ...], mode: str) -> dict[str, Any]:
    model = seeded(EvaluatedModel, torch.optim.SGD, {"lr": 1.0})
    seen: list[int] = []
    model.on_validation_batch_start = lambda *a: seen.append(a[1])  # type: ignore[method-assign]
    trainer = make_trainer({"uneven_inputs": mode}, max_epochs=2)
    trainer.fit(model, _loader(kind, train), _loader(kind, val))
    predicted = trainer.predict(model, _loader(kind, val))
    return {
        "state": model.final_state,
        "steps": trainer.global_step,
        "val": len(seen),
        "predicted": len(predicted),
    }


@pytest.mark.parametrize("kind", ["sized", "stream"])
def test_all_ranks_stop_after_the_last_batch_that_all_have(kind: str) -> None:
    results = run_on_warm_ranks(_train, 3, kind, (7, 5, 6), (2, 3, 4), "stop")
    for rank in range(3):
        assert (results[rank]["steps"], results[rank]["val"], results[rank]["predicted"]) == (
            10,
            4,
            2 + rank,
        )
    start = seeded(EvaluatedModel, torch.optim.SGD, {"lr": 1.0})
    reference = train_unsharded(train_unsharded(start, 5, 3), 5, 3).final_state
    assert (
        max(float((results[0]["state"][key] - reference[key]).abs().max()) for key in reference)
        <= 1e-6
    )


class Predicts(EvaluatedModel):
    """Counts its predictions, and the batches for which hooks are called."""

    num_predictions = num_hooks = 0

    def predict_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> Tensor:
        self.num_predictions += 1
        return self(batch)

    def on_predict_batch_end(self, *_: Any) -> None:
        self.num_hooks += 1


def _predict(kind: str, counts: tuple[int, ...]) -> dict[str, Any]:
    """Return predictions under each strategy of two loaders, the counts of predict_step and of
    hooks."""
    strategies = {
        "sharded": TorchRecShardedStrategy(),
        "no prefetching": TorchRecShardedStrategy(prefetch={"depth": 1}),
        "fsdp": TunedFSDPStrategy(),
        "ddp": TunedDDPStrategy(),
        "ddp, sharded before": TunedDDPStrategy(),
    }
    results = {}
    for name, strategy in strategies.items():
        model = seeded(Predicts, torch.optim.SGD, {"lr": 1.0})
        if name == "ddp, sharded before":
            make_trainer().predict(
                model, rank_loader(1, rank_and_num_ranks()[0]), return_predictions=False
            )
            model.num_predictions = model.num_hooks = 0
        trainer = pl.Trainer(strategy=strategy, devices=rank_and_num_ranks()[1], **DEFAULTS)
        predicted = trainer.predict(model, [_loader(kind, counts), _loader(kind, counts[::-1])])
        results[name] = (predicted, model.num_predictions, model.num_hooks)
    without = pl.Trainer(strategy=TunedDDPStrategy(), devices=rank_and_num_ranks()[1], **DEFAULTS)
    unsharded = seeded(Predicts, torch.optim.SGD, {"lr": 1.0})
    results["a rank without data"] = len(without.predict(unsharded, _loader(kind, (2, 0))))
    return results


@pytest.mark.parametrize("kind", slow_except(["stream"], ["sized", "stream"]))
def test_every_batch_of_every_rank_is_predicted(kind: str) -> None:
    counts = (5, 3)
    model = seeded(EvaluatedModel, torch.optim.SGD, {"lr": 1.0}).requires_grad_(False)
    for rank, results in enumerate(run_on_warm_ranks(_predict, 2, kind, counts)):
        assert results.pop("a rank without data") == (2, 0)[rank]
        lengths = (counts[rank], counts[1 - rank])
        expected = [
            [model(make_batch(1000 * step + rank)) for step in range(length)] for length in lengths
        ]
        for name, (predicted, num_predictions, num_hooks) in results.items():
            torch.testing.assert_close(
                predicted, expected, msg=lambda text, name=name: f"{name}: {text}"
            )
            # Under ddp a rank goes on alone; else it runs its last batch again with the others,
            # without hooks.
            assert (num_predictions, num_hooks) == ((8, 8) if name == "ddp" else (10, 8)), name


ERRORS: dict[str, tuple[tuple[Any, ...], str]] = {
    "sized, error": (("sized", (4, 3), (2, 2), "error"), "uneven_inputs='error'"),
    "stream, error": (("stream", (4, 3), (2, 2), "error"), "uneven_inputs='error'"),
    "sized, none": (("sized", (4, 0), (2, 2), "stop"), "Give every rank at least one batch"),
    "stream, none": (("stream", (4, 0), (2, 2), "stop"), "Give every rank at least one batch"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_unequal_batches_are_one_error_on_every_rank_where_they_cannot_be_trained(
    name: str,
) -> None:
    arguments, words = ERRORS[name]
    with pytest.raises(RankFailed) as failed:
        run_on_warm_ranks(_train, 2, *arguments)
    words_by_rank = words_of_ranks(failed.value)
    assert len(words_by_rank) == 2
    for said in words_by_rank.values():
        assert re.search(f"^.*DataError: .*{words}", said, re.MULTILINE), said


def _several_loaders() -> list[int]:
    model = seeded(EvaluatedModel, torch.optim.SGD, {"lr": 1.0})
    seen: list[int] = []
    model.on_validation_batch_start = lambda *a: seen.append(a[2])  # type: ignore[method-assign]
    loaders = [_loader("stream", (3, 4)), _loader("sized", (5, 2)), _loader("stream", (2, 1))]
    make_trainer().validate(model, loaders, verbose=False)
    return seen


def test_several_loaders_stay_paired_across_ranks() -> None:
    for seen in run_on_warm_ranks(_several_loaders, 2):
        assert seen == [0, 0, 0, 1, 1, 2]


class FailsToStart:
    """A loader that fails before its first batch, on one rank; Lightning's own look at it goes
    well."""

    times = 0

    def __iter__(self) -> Iterator[Any]:
        self.times += 1
        if rank_and_num_ranks()[0] == 1 and self.times > 1:
            raise OSError("no such file")
        return iter(Stream(3, 0))


def _fails_to_start() -> None:
    make_trainer().fit(seeded(EvaluatedModel, torch.optim.SGD, {"lr": 1.0}), FailsToStart())


def test_a_loader_that_fails_to_start_on_one_rank_is_named_on_the_others() -> None:
    with pytest.raises(RankFailed) as failed:
        run_on_warm_ranks(_fails_to_start, 2)
    assert "DataError: the dataloader of rank 1 failed at batch 0: OSError: no such file" in str(
        failed.value
    )
