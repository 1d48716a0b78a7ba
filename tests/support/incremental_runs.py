"""Fits that save differences, and at the same steps full checkpoints to compare them with."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor

from lightning_distrec import NormalizeRows
from lightning_distrec.checkpoint.contents import read_contents
from lightning_distrec.checkpoint.difference import Mark, read_mark
from lightning_distrec.checkpoint.lazy_tensors import collect_tensors
from tests.support.click_model import LooksUpTwice, rank_loader, seeded
from tests.support.ranks import rank_and_num_ranks
from tests.support.resuming import Changed
from tests.support.trainers import make_trainer

EVERY = 2
SERIES = {"every": EVERY, "full_every": 100, "keep": 10}
NARROW = "ebc.embedding_bags.narrow.weight"
Optimizer = tuple[type, dict[str, Any]]


class LargeTables(Changed):
    """Looks up some rows of its tables."""

    changes = {
        "wide": {"num_embeddings": 300},
        "narrow": {"num_embeddings": 185},
        "shared": {"num_embeddings": 110},
    }


class Twice(LooksUpTwice, LargeTables):
    """Looks its tables up twice in a step."""


class WritesInStep(LargeTables):
    """Writes rows that it does not look up, in its step, in a way that torch does not count."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 3:
            self.get_parameter(NARROW).data.mul_(1.5)
        return super().training_step(batch, batch_idx)


class WritesInPlace(LargeTables):
    """Writes rows that it does not look up."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == 3:
            with torch.no_grad():
                self.get_parameter(NARROW).add_(0.5)


class Draws(LargeTables):
    """Draws all rows of a table anew."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            torch.nn.init.uniform_(self.get_parameter(NARROW))


class Loads(LargeTables):
    """Loads a table of zeros."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            state = {"state_dict": {NARROW: torch.zeros(185, 8)}}
            self.trainer.strategy.load_model_state_dict(state, strict=False)


class ResetsState(LargeTables):
    """Begins the state of a table's optimizer anew."""

    def on_train_batch_end(self, *_: Any) -> None:
        for state in self.optimizers().optimizer.state.values():
            if self.trainer.global_step == 3 and "sum" in state:
                state["sum"].fill_(0.25)


class KeepsGradients(LargeTables):
    """Steps its tables every third batch, by the gradients of three, and its other layers in
    each."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        dense = torch.optim.SGD(self.mlp.parameters(), lr=0.1)
        return [self.optimizer(self.ebc.parameters(), **self.options), dense]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        tables, dense = self.optimizers()
        dense.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        dense.step()
        if batch_idx % 3 == 2:
            tables.step()
            tables.zero_grad()


class Unfreezes(LargeTables):
    """Lets a table learn from the fourth batch on."""

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        self.ebc.embedding_bags["narrow"].requires_grad_(False)
        return made

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.get_parameter(NARROW).requires_grad_(True)


class WithoutTables(LargeTables):
    """Has dense layers alone."""

    def _build(self) -> None:
        self.ebc = None

    def configure_model(self) -> None:
        """Everything is built."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.mlp(batch["label"].unsqueeze(1).expand(-1, 56)).squeeze(-1)


class Dies(pl.Callback):
    """Raises after the seventh step."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 7:
            raise ZeroDivisionError


class FullToo(pl.Callback):
    """Saves a full checkpoint whenever a difference is due."""

    def __init__(self, folder: str) -> None:
        self.folder, self.last = folder, 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step // EVERY > self.last // EVERY:
            trainer.save_checkpoint(
                f"{self.folder}/full/step={trainer.global_step}.ckpt", weights_only=False
            )
        self.last = trainer.global_step


def normalize() -> pl.Callback:
    """Return a callback that scales all rows of a table."""
    return NormalizeRows([NARROW], max_norm=0.05)


def average() -> pl.Callback:
    """Return a callback that saves averages of all rows in the place of the rows."""
    return EMAWeightAveraging(decay=0.9)


def fit(
    folder: str,
    steps: int,
    optimizer: Optimizer,
    strategy: dict[str, Any] | None = None,
    model: type = LargeTables,
    callbacks: tuple[Any, ...] = (),
    series: dict[str, Any] | None = None,
    checkpoint: dict[str, Any] | None = None,
) -> dict[str, Tensor]:
    """Train and save; return the model's state at the end. callbacks: functions that make them."""
    rank, _ = rank_and_num_ranks()
    options = {"incremental": SERIES | {"dirpath": f"{folder}/series"} | (series or {})} | (
        checkpoint or {}
    )
    trainer = make_trainer(
        {"checkpoint": options, **(strategy or {})},
        callbacks=[*(callback() for callback in callbacks), FullToo(folder)],
        default_root_dir=folder,
    )
    trained = seeded(model, *optimizer)
    trainer.fit(trained, rank_loader(steps, rank))
    return trained.final_state


def resume(
    path: str, optimizer: Optimizer, strategy: dict[str, Any] | None = None
) -> dict[str, Tensor]:
    """Go on from a checkpoint, on these ranks; return the state at the end."""
    model = seeded(LargeTables, *optimizer)
    rank, _ = rank_and_num_ranks()
    make_trainer(strategy).fit(model, rank_loader(9, rank), ckpt_path=path)
    return model.final_state


def series_in(folder: Path) -> dict[str, Mark]:
    """Return name -> mark of the checkpoints of a series."""
    actual = {
        path.name: read_mark(path, read_contents(path).marker)
        for path in folder.glob("series/*.ckpt")
    }
    return {name: mark for name, mark in sorted(actual.items()) if mark is not None}


def tensors_in(path: Path) -> dict[str, Tensor]:
    """Return weights and optimizer state, by place, without parameters' names and numbers."""
    checkpoint = read_contents(path).checkpoint
    actual = {
        f"weights/{place}": lazy
        for place, lazy in collect_tensors(checkpoint["state_dict"]).items()
    }
    for i, state in enumerate(checkpoint["optimizer_states"]):
        for j, parameter_state in enumerate(state["state"].values()):
            actual |= {
                f"{i}/{j}/{place}": lazy for place, lazy in collect_tensors(parameter_state).items()
            }
    return {place: lazy.read().clone() for place, lazy in actual.items()}


def assert_same_as_full(folder: Path) -> dict[str, Mark]:
    """Assert that each of a series holds, bit by bit, what the full checkpoint of its step holds;
    return the series."""
    series = series_in(folder)
    for name in series:
        actual = tensors_in(folder / "series" / name)
        expected = tensors_in(folder / "full" / f"{name.partition('-')[0]}.ckpt")
        assert actual.keys() == expected.keys(), name
        assert [
            place for place in expected if not torch.equal(actual[place], expected[place])
        ] == [], name
    return series
