"""Runs that use Lightning's loops in many ways, each at a depth of prefetching that is given."""

import copy
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_distrec.errors import DistRecError
from tests.support.prefetched_model import (
    Batch,
    Resumable,
    ResumableWithLength,
    Watched,
    collated,
    names_in,
    sized,
    unsized,
)
from tests.support.prefetched_runs import Seen, seen_by
from tests.support.ranks import rank_and_num_ranks

Scenario = Callable[[int], Seen]


def fit(
    depth: int, train: Callable[[], Any], val: Callable[[], Any] | None = None, **options: Any
) -> Seen:
    """Fit once."""
    return seen_by(
        depth,
        lambda trainer, model: trainer.fit(model, train(), None if val is None else val()),
        **options,
    )


def several() -> list[DataLoader]:
    """Return loaders of which some know their length."""
    return [sized(3, 500), unsized(2, 600), sized(1, 700), unsized(4, 800)]


# -- steps of other kinds


class TwoLoaders(Watched):
    """Takes a batch of each of two loaders, one of them None where it has ended."""

    def training_step(self, batch: dict[str, Batch | None], batch_idx: int) -> Tensor:
        losses = [self.loss_of(part) for part in batch.values() if part is not None]
        self.note("training", names_in(batch), batch_idx, float(sum(losses)))
        return torch.stack(losses).sum()


class EndsEpochs(Watched):
    """Ends an epoch before its fourth batch, and the second one before its first."""

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> int | None:
        return -1 if batch_idx == 3 or self.trainer.current_epoch == 1 else None


class StopsItself(Watched):
    """Asks the trainer to stop after its fifth step."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if self.trainer.global_step == 4:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


class ByHand(Watched):
    """Runs its optimizer itself, twice a step, between two lookups."""

    automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(2):
            loss = self.loss_of(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.note("training", names_in(batch), batch_idx, float(loss.detach()))


class TakesIterator(Watched):
    """Fetches its batches itself."""

    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor | None:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class ReloadsItsLoaders(Watched):
    """Has other loaders in every epoch."""

    def train_dataloader(self) -> DataLoader:
        epoch = self.trainer.current_epoch
        return sized(2 + epoch, 10 * epoch)

    def val_dataloader(self) -> DataLoader:
        return unsized(2, 500 + 10 * self.trainer.current_epoch)


class Transfers(Watched):
    """Changes batches on their way."""

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return batch | {"ids": batch["ids"] // 2}

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        return batch | {"label": 1 - batch["label"], "ids": batch["ids"] + dataloader_idx}


class WithDropout(Watched):
    """Draws random numbers in its steps."""

    def look_up(self, batch: Batch) -> Tensor:
        return torch.nn.functional.dropout(super().look_up(batch), 0.2, self.training)


# -- what is done with them


class KeepsIndices(BasePredictionWriter):
    """Writes down which examples each prediction is of."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")

    def write_on_batch_end(
        self,
        trainer: Any,
        module: Any,
        prediction: Any,
        indices: Any,
        batch: Any,
        *batch_indices: int,
    ) -> None:
        module.note("written", list(indices), names_in(batch), *batch_indices)

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        module.note("all written", indices)


def _validate_test_predict(trainer: pl.Trainer, model: Watched) -> Any:
    trainer.fit(model, sized(3), unsized(2, 500))
    validated = trainer.validate(model, several(), verbose=False)
    tested = trainer.test(model, unsized(3, 500), verbose=False)
    return validated, tested, trainer.predict(model, several())


def _fit_twice(trainer: pl.Trainer, model: Watched) -> None:
    trainer.fit(model, unsized(5), sized(2, 500))
    trainer.fit_loop.max_epochs = 4
    trainer.fit(model, sized(3, 50), sized(2, 500))


def _predict(trainer: pl.Trainer, model: Watched) -> Any:
    predicted = trainer.predict(model, [collated(7, 2), collated(5, 3), collated(3, 1)])
    quiet = trainer.predict(model, collated(4, 3), return_predictions=False)
    return predicted, quiet


def _combined(depth: int, mode: Any, first: Callable[[], Any], other: Callable[[], Any]) -> Seen:
    return fit(
        depth,
        lambda: CombinedLoader({"one": first(), "other": other()}, mode),
        model=TwoLoaders,
        max_epochs=2,
        catch=(DistRecError,),
    )


class KeepsStates(pl.Callback):
    """Writes down the loaders' states in each checkpoint that is saved."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        states = checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"]
        module.note("saved", checkpoint["global_step"], copy.deepcopy(states))


def _saved(depth: int, loader: Callable[[], Any], **options: Any) -> Seen:
    """Save a checkpoint in the middle of each epoch."""
    with tempfile.TemporaryDirectory() as folder:  # that of rank 0 is used
        saving = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)
        callbacks = [saving, KeepsStates()]
        return fit(
            depth, loader, enable_checkpointing=True, max_epochs=2, callbacks=callbacks, **options
        )


def _resumable(endless: bool = False, has_length: bool = True) -> Any:
    return (ResumableWithLength if has_length else Resumable)(5, endless)


def _shuffled(depth: int) -> Seen:
    torch.manual_seed(3)
    # As users have it: the loader draws from the same random numbers as the model.
    return fit(depth, lambda: collated(11, 2, shuffle=True), model=WithDropout, max_epochs=2)


val = partial(sized, 2, 500)
SCENARIOS: dict[str, Scenario] = {
    "three epochs": partial(fit, train=partial(sized, 4), val=val, max_epochs=3),
    "val_check_interval over epochs": partial(
        fit,
        train=partial(sized, 5),
        val=val,
        val_check_interval=3,
        check_val_every_n_epoch=None,
        max_epochs=3,
    ),
    "workers": partial(
        fit,
        train=partial(sized, 5, num_workers=2, persistent_workers=True),
        val=partial(unsized, 2, 500, num_workers=1, persistent_workers=True),
        max_epochs=2,
    ),
    "reloaded": partial(
        seen_by,
        act=lambda t, m: t.fit(m),
        model=ReloadsItsLoaders,
        reload_dataloaders_every_n_epochs=1,
        max_epochs=3,
    ),
    "on_train_batch_start returns -1": partial(
        fit, train=partial(sized, 6), val=val, model=EndsEpochs, max_epochs=3
    ),
    "the same, unsized": partial(
        fit, train=partial(unsized, 6), val=val, model=EndsEpochs, max_epochs=3
    ),
    "should_stop": partial(fit, train=partial(sized, 4), val=val, model=StopsItself, max_epochs=3),
    "by hand": partial(fit, train=partial(sized, 5), val=val, model=ByHand, max_epochs=2),
    "dataloader_iter": partial(
        fit, train=partial(sized, 5), val=val, model=TakesIterator, max_epochs=2
    ),
    "transfers": partial(
        seen_by,
        act=lambda t, m: (t.fit(m, unsized(4), several()), t.predict(m, several())),
        model=Transfers,
        max_epochs=2,
    ),
    "fit twice": partial(seen_by, act=_fit_twice, max_epochs=2),
    "fit, validate, test, predict": partial(seen_by, act=_validate_test_predict),
    "predict": partial(seen_by, act=_predict, callbacks=[KeepsIndices()]),
    "shuffled": _shuffled,
    "max_size_cycle unsized": partial(
        _combined, mode="max_size_cycle", first=partial(unsized, 3), other=partial(unsized, 5, 50)
    ),
    "max_size": partial(
        _combined, mode="max_size", first=partial(sized, 3), other=partial(sized, 5, 50)
    ),
    "saved": partial(_saved, loader=_resumable),
    "saved unsized": partial(_saved, loader=partial(_resumable, has_length=False)),
    "saved endless": partial(
        _saved, loader=partial(_resumable, True, False), limit_train_batches=4
    ),
}
"""Name -> a fit at a depth."""


def _uneven(depth: int, mode: Any, uneven_inputs: str = "stop") -> Seen:
    """Fit with two loaders of unknown lengths, one of them longer on rank 0."""
    length = 4 if rank_and_num_ranks()[0] == 0 else 3
    return seen_by(
        depth,
        lambda t, m: t.fit(
            m, CombinedLoader({"one": unsized(length), "other": unsized(6, 50)}, mode)
        ),
        model=TwoLoaders,
        strategy={"uneven_inputs": uneven_inputs},
        catch=(DistRecError,),
        max_epochs=2,
    )


UNEVEN: dict[str, Scenario] = {
    "min_size": partial(_uneven, mode="min_size"),
    "max_size_cycle": partial(_uneven, mode="max_size_cycle"),
    "max_size_cycle, an error": partial(_uneven, mode="max_size_cycle", uneven_inputs="error"),
}
