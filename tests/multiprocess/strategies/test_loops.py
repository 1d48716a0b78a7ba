"""Loaders, anomaly detection and compiled modules keep their meaning over sharded tables."""

import re
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from tests.support.click_model import FEATURES, ClickModel, rank_loader, seeded
from tests.support.plain_loop import (
    EVERY_CUT,
    OPTIMIZERS,
    STEPS,
    USUAL,
    Batch,
    State,
    assert_equal,
    fit_with_each,
    global_batches,
    loss_of,
    train_plain,
    train_plain_click_model,
)
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import make_trainer


class TwoLoaders(ClickModel):
    """Takes a batch of each of two loaders."""

    def training_step(self, batch: dict[str, Batch], batch_idx: int) -> Tensor:
        return loss_of(self, batch["one"]) + 0.5 * loss_of(self, batch["other"])


def _combined(mode: str) -> dict[str, State]:
    rank, _ = rank_and_num_ranks()
    states = {}
    for name in USUAL:
        model = seeded(TwoLoaders, *OPTIMIZERS[name])
        loaders = {"one": rank_loader(5, rank), "other": rank_loader(3, rank, first=50)}
        update = "sparse" if name == "Adagrad" else "auto"
        make_trainer({"embedding_update": update}).fit(model, CombinedLoader(loaders, mode))
        states[name] = model.final_state
    return states


class TakesIterator(ClickModel):
    """Fetches its batches itself."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class ChangesLoader(ClickModel):
    """Has other batches in every epoch, and on rank 1 one more of them than on rank 0."""

    def train_dataloader(self) -> DataLoader:
        rank, _ = rank_and_num_ranks()
        epoch = self.trainer.current_epoch
        return rank_loader(2 + epoch + rank, rank, first=10 * epoch)


def _reloaded() -> dict[str, State]:
    states = {}
    for name in USUAL:
        model = seeded(ChangesLoader, *OPTIMIZERS[name])
        make_trainer(max_epochs=3, reload_dataloaders_every_n_epochs=1).fit(model)
        states[name] = model.final_state
    return states


class NaNGradient(torch.autograd.Function):
    """Hands on its input, and a NaN as its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * float("nan")


class GoesWrong(ClickModel):
    """Has a NaN in its backward."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return NaNGradient.apply(super().training_step(batch, batch_idx))


def _go_wrong() -> str:
    try:
        fit_with_each(GoesWrong, ("SGD",), {}, ANOMALY)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


class CompiledDense(ClickModel):
    """Compiles its dense layers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.mlp = torch.compile(self.mlp, backend="aot_eager")


def _compiled_dense() -> dict[str, State]:
    states = fit_with_each(CompiledDense, ("SGD", "Adam"))
    return {
        name: {key.replace("_orig_mod.", ""): value for key, value in state.items()}
        for name, state in states.items()
    }


class BagsAndDense(nn.Module):
    """A collection and what reads it, which are compiled as one."""

    def __init__(self, ebc: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.ebc, self.mlp = ebc, mlp

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.mlp(self.ebc(features).values()).squeeze(-1)  # type: ignore[no-any-return]


class CompiledSubmodule(ClickModel):
    """Compiles its collection along with its dense layers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.net = BagsAndDense(self.ebc, self.mlp)
        self.net.compile(backend="aot_eager")

    def forward(self, batch: Batch) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        return self.net(features)  # type: ignore[no-any-return]


def _compiled_submodule() -> tuple[dict[str, State], int, list[str], int]:
    """Return weights, how many frames were compiled, why graphs ended, and how many lookups were
    prefetched."""
    counters.clear()
    torch.compiler.reset()
    rank, _ = rank_and_num_ranks()
    model, trainer = seeded(CompiledSubmodule, *OPTIMIZERS["SGD"]), make_trainer()
    trainer.fit(model, rank_loader(STEPS, rank))
    states = {
        "SGD": {
            key: value for key, value in model.final_state.items() if not key.startswith("net.")
        }
    }
    prefetched = trainer.strategy.lookups_ahead["training 0"].ahead
    return states, counters["frames"]["total"], list(counters["graph_break"]), prefetched


class WithoutLogging(ClickModel):
    """Logs nothing: Lightning's own `log` cannot be compiled by every torch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return loss_of(self, batch)


def _compiled_module() -> dict[str, State]:
    rank, _ = rank_and_num_ranks()
    states = {}
    for name in ("SGD", "Adam"):
        model = seeded(WithoutLogging, *OPTIMIZERS[name])
        make_trainer().fit(torch.compile(model, backend="aot_eager"), rank_loader(STEPS, rank))
        states[name] = model.final_state
    return states


ANOMALY = {"detect_anomaly": True}
RUNS: dict[str, tuple[Any, ...]] = {
    "max_size_cycle": (_combined, "max_size_cycle"),
    "min_size": (_combined, "min_size"),
    "iterator": (fit_with_each, TakesIterator, USUAL),
    "reloaded": (_reloaded,),
    "overfit": (fit_with_each, ClickModel, USUAL, {}, {"overfit_batches": 2, "max_epochs": 3}),
    "anomaly": (fit_with_each, ClickModel, USUAL, {}, ANOMALY),
    "anomaly sparse": (
        fit_with_each,
        ClickModel,
        ("Adagrad",),
        {"embedding_update": "sparse"},
        ANOMALY,
    ),
    "anomaly every cut": (fit_with_each, ClickModel, ("SGD",), EVERY_CUT, ANOMALY),
    "goes wrong": (_go_wrong,),
}


@pytest.fixture(scope="module")
def rank_results() -> list[dict[str, Any]]:
    """What each rank found in each run."""
    return run_each_on_ranks(RUNS, 2)


@pytest.fixture(scope="module")
def actual(rank_results: list[dict[str, Any]]) -> dict[str, Any]:
    """What rank 0 found in each run."""
    return rank_results[0]


@pytest.mark.parametrize("mode", ["max_size_cycle", "min_size"])
def test_combined_loaders_give_each_step_a_batch_of_each(actual: dict[str, Any], mode: str) -> None:
    pairs = list(zip(global_batches(5), cycle(global_batches(3, first=50)), strict=False))
    batches = [
        {"one": first, "other": other}
        for first, other in pairs[: 5 if mode == "max_size_cycle" else 3]
    ]
    assert_equal(
        actual[mode], lambda name: train_plain(seeded(TwoLoaders, *OPTIMIZERS[name]), batches)
    )


def test_a_training_step_that_fetches_its_batches_is_exact(actual: dict[str, Any]) -> None:
    assert_equal(actual["iterator"], train_plain_click_model)


def test_every_epoch_may_have_a_loader_of_its_own(actual: dict[str, Any]) -> None:
    batches = [batch for epoch in range(3) for batch in global_batches(2 + epoch, first=10 * epoch)]
    assert_equal(
        actual["reloaded"], lambda name: train_plain(seeded(ClickModel, *OPTIMIZERS[name]), batches)
    )


def test_overfit_batches_repeats_the_first_batches(actual: dict[str, Any]) -> None:
    batches = 3 * global_batches(2)
    assert_equal(
        actual["overfit"], lambda name: train_plain(seeded(ClickModel, *OPTIMIZERS[name]), batches)
    )


def test_anomaly_detection_changes_no_number(actual: dict[str, Any]) -> None:
    for case in ("anomaly", "anomaly sparse", "anomaly every cut"):
        assert_equal(actual[case], train_plain_click_model)


def test_anomaly_detection_finds_a_gradient_that_is_not_a_number(
    rank_results: list[dict[str, Any]],
) -> None:
    for result in rank_results:
        assert "Function 'NaNGradientBackward' returned nan values" in result["goes wrong"]


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """What rank 0 trained, by what was compiled."""
    calls = {
        "dense": (_compiled_dense,),
        "module": (_compiled_module,),
        "submodule": (_compiled_submodule,),
    }
    return run_each_on_ranks(calls, 2)[0]


@pytest.mark.slow
def test_compiled_dense_layers_are_exact(compiled: dict[str, Any]) -> None:
    assert_equal(compiled["dense"], train_plain_click_model)


@pytest.mark.slow
def test_a_compiled_lightning_module_is_exact(compiled: dict[str, Any]) -> None:
    assert_equal(compiled["module"], train_plain_click_model)


@pytest.mark.slow
def test_a_compiled_submodule_is_exact_and_its_graph_ends_at_lookups_only(
    compiled: dict[str, Any],
) -> None:
    states, frames, breaks, prefetched = compiled["submodule"]
    assert_equal(states, train_plain_click_model)
    # Dynamo followed the lookup into the prefetcher once, with 119 frames and breaks of 10 kinds.
    assert 0 < frames <= 10
    assert all(re.search("_look_up|LazyOutput.get", reason) for reason in breaks), breaks
    assert prefetched > 0
