"""Runs in which something fails, each at a depth of prefetching that is given."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch.utils.data import DataLoader

from tests.support.prefetched_model import Batch, Numbered, Stream, Watched, sized, unsized
from tests.support.prefetched_runs import Seen, seen_by
from tests.support.prefetched_scenarios import TakesIterator, fit
from tests.support.ranks import rank_and_num_ranks


class Fails(Watched):
    """Fails where it is told to. ranks: those that fail; at: number of the batch; kind: what is
    raised."""

    def __init__(
        self,
        place: str,
        batch_number: int,
        ranks: tuple[int, ...],
        kind: type[BaseException] = ValueError,
    ) -> None:
        super().__init__()
        self.place, self.batch_number, self.ranks, self.kind = place, batch_number, ranks, kind

    def fail(self, place: str, batch: Batch) -> None:
        """Raise, where and when it is due."""
        if (
            place == self.place
            and int(batch["name"][0]) % 1000 == self.batch_number
            and self.global_rank in self.ranks
        ):
            raise self.kind("the user's code failed")

    def on_before_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        self.fail("transfer hook", batch)
        return batch

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.fail("before lookups", batch)
        loss = super().training_step(batch, batch_idx)
        self.fail("after lookups", batch)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.fail("validation", batch)
        super().validation_step(batch, batch_idx, dataloader_idx)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.fail("batch start", batch)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.fail("batch end", batch)


def fails(
    depth: int,
    place: str,
    batch_number: int,
    ranks: tuple[int, ...],
    kind: type[BaseException] = ValueError,
) -> Seen:
    """Fit a model that fails; then, where all ranks did, fit another one."""
    model: Callable[[], Any] = partial(Fails, place, batch_number, ranks, kind)
    seen = fit(
        depth,
        partial(sized, 5),
        partial(sized, 3, 500),
        model=model,
        val_check_interval=2,
        catch=(kind, Exception),
    )
    if len(ranks) == rank_and_num_ranks()[1]:
        second_fit = fit(depth, partial(sized, 4), partial(unsized, 2, 500), max_epochs=2)
        seen.returned = (second_fit.diary, second_fit.state)
    return seen


def loader_fails(depth: int, kind: str) -> Seen:
    """Fit with a loader that fails on rank 1 at its fourth batch."""
    batch_number = 3 if rank_and_num_ranks()[0] == 1 else None
    dataset = (Numbered if kind == "sized" else Stream)(6, 0, batch_number)
    return fit(depth, lambda: DataLoader(dataset, batch_size=None), catch=(Exception,))


def validation_loader_fails(depth: int) -> Seen:
    """Validate with a sized loader that fails on rank 1, and one of unknown length after it."""
    batch_number = 3 if rank_and_num_ranks()[0] == 1 else None
    loaders = [DataLoader(Numbered(4, 500, batch_number), batch_size=None), unsized(3, 600)]
    return seen_by(depth, lambda t, m: t.validate(m, loaders, verbose=False), catch=(Exception,))


def validation_hook_fails(depth: int) -> Seen:
    """Validate with loaders of unknown lengths, and a transfer hook that fails on rank 1."""
    return seen_by(
        depth,
        lambda t, m: t.validate(m, [unsized(3, 500), unsized(3, 600)], verbose=False),
        model=partial(Fails, "transfer hook", 501, (1,)),
        catch=(Exception,),
    )


class Signalled(pl.Callback):
    """Sends SIGTERM to its own rank at a step, or at a validation batch of it.

    ranks: rank -> seconds to wait before that.
    """

    def __init__(self, ranks: dict[int, float], step: int, in_validation: bool) -> None:
        self.ranks, self.step, self.in_validation = ranks, step, in_validation

    def _signal(self, trainer: pl.Trainer, in_validation: bool) -> None:
        seconds = self.ranks.get(trainer.global_rank)
        if (
            in_validation == self.in_validation
            and trainer.global_step == self.step
            and seconds is not None
        ):
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._signal(trainer, False)

    def on_validation_batch_start(
        self, trainer: Any, module: Any, batch: Any, batch_idx: int, *_: int
    ) -> None:
        if batch_idx == 1:
            self._signal(trainer, True)


class WithoutTables(Watched):
    """Has no tables."""

    def __init__(self) -> None:
        super().__init__()
        del self.ebc, self.embedding

    def look_up(self, batch: Batch) -> Any:
        return batch["label"].unsqueeze(1).expand(-1, 64)


MODELS = {"tables": Watched, "no tables": WithoutTables, "dataloader_iter": TakesIterator}


def signalled(
    depth: int, model: str, ranks: dict[int, float], step: int, in_validation: bool
) -> Seen:
    """Fit, and send SIGTERM to these ranks."""
    seen = fit(
        depth,
        partial(sized, 12),
        partial(sized, 4, 500),
        model=MODELS[model],
        val_check_interval=4,
        callbacks=[Signalled(ranks, step, in_validation)],
        catch=(BaseException,),
    )
    seen.returned = len(seen.trained)
    return seen
