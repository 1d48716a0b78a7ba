"""Loaders, anomaly detection and compiled modules keep their meaning over sharded tables."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from tests.support.cases import Case, check, click_batch, click_case
from tests.support.click_model import FEATURES, ClickModel, join_batches
from tests.support.plain_loop import EVERY_CUT, OPTIMIZERS, Batch, loss_of
from tests.support.ranks import rank_and_num_ranks


class TwoLoaders(ClickModel):
    """Takes a batch of each of two loaders of its own, of unequal lengths. mode: which one ends an
    epoch. alone: in one process, whose batches are those of both ranks."""

    def __init__(self, *args: Any, mode: str, alone: bool = False) -> None:
        super().__init__(*args)
        self.mode, self.alone = mode, alone

    def train_dataloader(self) -> CombinedLoader:
        loaders = {name: loader_of(*steps, self.alone) for name, steps in STEPS_OF.items()}
        return CombinedLoader(loaders, self.mode)

    def training_step(self, batch: dict[str, Batch], batch_idx: int) -> Tensor:
        return loss_of(self, batch["one"]) + 0.5 * loss_of(self, batch["other"])


STEPS_OF = {"one": (0, 5), "other": (50, 53)}


def loader_of(first: int, last: int, alone: bool) -> DataLoader[Any]:
    """Return a loader of this rank's batches, or of those of both ranks as one."""
    batches = []
    for step in range(first, last):
        if alone:
            batches.append(join_batches([click_batch(step, rank) for rank in range(2)]))
        else:
            batches.append(click_batch(step, rank_and_num_ranks()[0]))
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


class TakesIterator(ClickModel):
    """Fetches its batches itself."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class ChangesLoader(ClickModel):
    """Has other batches in every epoch, and on rank 1 one more of them than on rank 0."""

    def __init__(self, *args: Any, alone: bool = False) -> None:
        super().__init__(*args)
        self.alone = alone

    def train_dataloader(self) -> DataLoader[Any]:
        epoch = self.trainer.current_epoch
        more = 0 if self.alone else rank_and_num_ranks()[0]
        return loader_of(10 * epoch, 11 * epoch + 2 + more, self.alone)


class BagsAndDense(nn.Module):
    """A collection and what reads it, which are compiled as one."""

    def __init__(self, ebc: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.ebc, self.mlp = ebc, mlp

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.mlp(self.ebc(features).values()).squeeze(-1)  # type: ignore[no-any-return]


class CompiledSubmodule(ClickModel):
    """Compiles its collection along with its dense layers, or not."""

    def __init__(self, *args: Any, compiles: bool = True) -> None:
        super().__init__(*args)
        self.net = BagsAndDense(self.ebc, self.mlp)
        if compiles:
            counters.clear()
            torch.compiler.reset()
            self.net.compile(backend="aot_eager")

    def forward(self, batch: Batch) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        return self.net(features)  # type: ignore[no-any-return]


def compiled_frames(trainer: Any) -> tuple[int, list[str], int]:
    """Return how many frames were compiled, why graphs ended, and how many lookups were sent
    ahead."""
    prefetched = trainer.strategy.lookups_ahead["training 0"].ahead
    return counters["frames"]["total"], list(counters["graph_break"]), prefetched


def own_loader(kind: type, optimizer: str, trainer: dict[str, Any], **options: Any) -> Case:
    """Return a case of a model that makes its loaders itself."""
    alone = partial(kind, *OPTIMIZERS[optimizer], alone=True, **options)
    update = {"embedding_update": "sparse" if optimizer == "Adagrad" else "auto"}
    fields = {"plain": alone, "steps": 0, "loss_limit": None, "strategy": update}
    return click_case(kind, optimizer, trainer=trainer, **fields, **options)


ANOMALY = {"detect_anomaly": True}
RELOADED = {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}
OVERFIT = {"overfit_batches": 2, "max_epochs": 3}
CASES = {
    "max_size_cycle, sparse": own_loader(TwoLoaders, "Adagrad", {}, mode="max_size_cycle"),
    "reloaded": own_loader(ChangesLoader, "SGD", RELOADED),
    "iterator": click_case(TakesIterator, "Adagrad"),
    "overfit": click_case(ClickModel, "Adam", trainer=OVERFIT),
    "anomaly": click_case(ClickModel, strategy=EVERY_CUT, trainer=ANOMALY),
}


@pytest.mark.parametrize("name", CASES)
def test_loops_of_the_trainer_train_as_in_one_process(name: str) -> None:
    check(CASES[name])


NOT_COMPILED = partial(CompiledSubmodule, *OPTIMIZERS["SGD"], compiles=False)


@pytest.mark.slow
def test_a_compiled_submodule_is_exact_and_its_graph_ends_at_lookups_only() -> None:
    case = click_case(CompiledSubmodule, look=compiled_frames, plain=NOT_COMPILED)
    frames, breaks, prefetched = check(case)[0].seen
    # Dynamo followed the lookup into the prefetcher once, with 119 frames and breaks of 10 kinds.
    assert 0 < frames <= 10
    assert all(re.search("_look_up|LazyOutput.get", reason) for reason in breaks), breaks
    assert prefetched > 0
