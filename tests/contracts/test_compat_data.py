"""The same contracts, of how Lightning makes, begins and saves a fit's loaders, and restores before
on_fit_start."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.nn.parallel.distributed import _DDPSink
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from lightning_distrec._compat import lightning as _lightning
from lightning_distrec._compat import lightning_checkpoints as _checkpoints
from lightning_distrec._compat import lightning_data as _data
from lightning_distrec._compat import torch as _torch
from tests.support.trainers import one_process_trainer


class Stream:
    """Batches without a number, with a state."""

    def __init__(self) -> None:
        self.next = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.next < 4:
            self.next += 1
            yield torch.ones(1, 32) * self.next

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Looks(BoringModel):
    """Calls a function at the hooks of a fit."""

    def __init__(self, look: Any = None, at: str = "on_train_batch_end") -> None:
        super().__init__()
        self.look, self.at, self.seen = look, at, []

    def _call(self, hook: str) -> None:
        if hook == self.at and self.look is not None:
            self.seen.append(self.look(self.trainer))

    def on_fit_start(self) -> None:
        self._call("on_fit_start")

    def on_train_start(self) -> None:
        self._call("on_train_start")

    def on_train_batch_end(self, *_: Any) -> None:
        self._call("on_train_batch_end")


def _fit(model: Any, loader: Any, begins_late: Any = None, **options: Any) -> pl.Trainer:
    trainer = one_process_trainer(limit_val_batches=0, **options)
    with _data.resume_loaders(trainer, begins_late, lambda: None) if begins_late else nullcontext():
        trainer.fit(model, loader)
    return trainer


def test_resume_loaders_saves_the_states_of_the_batch_of_the_step() -> None:
    ahead, kept = Looks(_data.current_loader_states), Looks(_data.current_loader_states)
    _fit(ahead, Stream())
    # upstream draws a batch ahead
    assert [states[0]["next"] for states in ahead.seen] == [2, 3, 4, 4]
    _fit(kept, Stream(), begins_late=lambda: False)
    assert [states[0]["next"] for states in kept.seen] == [1, 2, 3, 4]


def test_wrapped_sampler_is_the_users() -> None:
    sampler = RandomSampler(range(4))
    assert (
        _data.wrapped_sampler(DistributedSamplerWrapper(sampler, num_replicas=2, rank=0)) is sampler
    )
    assert _data.wrapped_sampler(sampler) is sampler


def test_watch_dataloader_hooks_sees_the_modules_hooks_and_can_be_undone() -> None:
    names: list[str] = []

    @contextmanager
    def watch(name: str) -> Iterator[None]:
        names.append(name)
        yield

    model = BoringModel()
    trainer = one_process_trainer(max_steps=1)
    with _data.watch_dataloader_hooks(trainer, watch):
        trainer.fit(model)
    assert set(names) == {"train_dataloader", "val_dataloader"}
    assert "dataloader" not in vars(trainer.fit_loop._data_source)


def test_reload_epochs_are_where_lightning_keeps_them() -> None:
    model = Looks(_data.reload_epochs)
    trainer = _fit(
        model, DataLoader(torch.ones(2, 32)), max_epochs=3, reload_dataloaders_every_n_epochs=2
    )
    assert [train for train, _ in model.seen] == [0, 0, 0, 0, 2, 2]
    _data.set_reload_epochs(trainer, [1, None])
    assert _data.reload_epochs(trainer)[0] == 1
    assert trainer.fit_loop._last_train_dl_reload_epoch == 1


def test_continue_steps_begins_with_the_step_that_it_gets() -> None:
    model = Looks(_checkpoints.num_batches_stepped)
    trainer = one_process_trainer(limit_val_batches=0)
    with _checkpoints.continue_steps(trainer, 7):
        trainer.fit(model, DataLoader(torch.ones(2, 32)))
    assert model.seen == [8, 9]


def test_predict_few_examples_lets_a_rank_have_none() -> None:
    few = SequentialSampler([1])
    with pytest.raises(AssertionError):
        data_connector.UnrepeatedDistributedSamplerWrapper(few, num_replicas=2, rank=1)
    with _data.predict_few_examples():
        assert (
            list(data_connector.UnrepeatedDistributedSamplerWrapper(few, num_replicas=2, rank=1))
            == []
        )


@pytest.mark.parametrize("is_late", [False, True])
def test_resume_loaders_draws_the_first_batch_before_all_hooks_or_after(is_late: bool) -> None:
    stream = Stream()
    model = Looks(lambda trainer: stream.next, "on_train_start")
    trainer = _fit(model, stream, begins_late=lambda: is_late)
    assert model.seen == [0 if is_late else 1]
    assert (trainer.global_step, stream.next) == (4, 4)


class Predicts(BoringModel):
    """Notes what predict_step gets, and which hooks are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, ...]] = []

    def predict_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen.append((int(batch[0]), batch_idx, dataloader_idx))

    def on_after_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Tensor:
        return batch + 1

    def on_predict_batch_end(
        self, _: Any, batch: Tensor, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.seen.append(("end", batch_idx, dataloader_idx))


def test_a_prediction_can_be_made_again_without_hooks_and_results() -> None:
    model = Predicts()
    trainer = one_process_trainer()
    trainer.strategy.connect(model)

    def again(batch: tuple[int, ...], batch_idx: int, dataloader_idx: int) -> None:
        _data.predict_again(trainer, torch.ones(1) * batch[0], batch_idx, dataloader_idx)

    with _data.replace_predictions(trainer, tuple, again):
        loaders = [
            DataLoader(
                [torch.tensor([4.0]), (7,)], batch_size=None, collate_fn=lambda sample: sample
            )
        ] * 2
        assert trainer.predict(model, loaders) == [[None], [None]]
    assert model.seen == [
        item for loader in (0, 1) for item in ((5, 0, loader), ("end", 0, loader), (8, 1, loader))
    ]
    assert "_predict_step" not in vars(trainer.predict_loop)


def test_is_for_rank_zero_sees_the_decorator_alone() -> None:
    assert rank_zero_only(_lightning.is_for_rank_zero)() is True
    assert _lightning.is_for_rank_zero() is False


def test_restore_before_fit_starts_leaves_lightnings_own_connector_alone() -> None:
    trainer = one_process_trainer()
    before = dict(vars(trainer._checkpoint_connector))
    _checkpoints.restore_before_fit_starts(trainer)
    assert vars(trainer._checkpoint_connector) == before
    assert callable(trainer._checkpoint_connector._restore_modules_and_callbacks)


def test_is_ddp_sink_knows_the_node_behind_ddps_outputs() -> None:
    weight = nn.Parameter(torch.ones(2))
    (output,) = _DDPSink.apply(lambda: SimpleNamespace(_ddp_sink_clone=True), weight * 2)
    assert _torch.is_ddp_sink(output.grad_fn)
    assert not _torch.is_ddp_sink((weight * 2).grad_fn)
    assert isinstance(output.grad_fn, torch.autograd.function.BackwardCFunction)
