"""Lightning's loops call the same hooks, with the same arguments and under the same names, at less
Python."""

import inspect
import logging
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.trainer import call
from torch import nn
from torch.utils.data import DataLoader

from lightning_distrec._compat import lightning as _lightning_hooks
from lightning_distrec._compat import lightning_checkpoints as _lightning_checkpoints
from tests.support.trainers import one_process_trainer

HOOKS = [
    name for name, hook in vars(pl.Callback).items() if name.startswith("on_") and callable(hook)
]


class Notes(pl.Callback):
    """Overrides half of the hooks, and notes each call and the name under which self.log would
    log."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []


def _noting(name: str) -> Any:
    def hook(
        self: Notes,
        trainer: pl.Trainer,
        module: pl.LightningModule,
        *arguments: Any,
        **options: Any,
    ) -> None:
        self.calls.append((name, module._current_fx_name, len(arguments), sorted(options)))

    return hook


for _name in HOOKS[::2]:
    setattr(Notes, _name, _noting(_name))


class Model(pl.LightningModule):
    """Overrides some hooks, one of them on the instance alone, and logs."""

    def __init__(self, takes_index: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.calls: list[tuple[Any, ...]] = []
        self.on_after_backward = lambda: self.note("on_after_backward")
        if takes_index:
            self.training_step = lambda batch, batch_idx: self.step(batch, batch_idx)

    def note(self, name: str) -> None:
        self.calls.append((name, self._current_fx_name))

    def step(self, batch: Any, batch_idx: int = -1) -> Any:
        self.calls.append(("step", batch_idx, self._current_fx_name))
        self.log("loss", batch.sum(), on_epoch=True)
        return self.layer(batch).sum()

    def training_step(self, batch: Any) -> Any:
        return self.step(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.calls.append(("validation", batch_idx, self._current_fx_name))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.note("on_train_batch_start")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(lean: bool, takes_index: bool) -> tuple[Any, ...]:
    torch.manual_seed(0)
    model, notes = Model(takes_index), Notes()
    trainer = one_process_trainer(max_epochs=2, callbacks=[notes, pl.Callback()])
    with _lightning_hooks.call_overridden_hooks(trainer) if lean else nullcontext():
        trainer.fit(model, DataLoader(torch.ones(4, 2)), DataLoader(torch.ones(1, 2)))
    assert "profile" not in vars(trainer.profiler)
    return notes.calls, model.calls, trainer.callback_metrics, model.layer.weight.tolist()


@pytest.mark.parametrize("takes_index", [True, False])
def test_a_fit_calls_the_same_hooks_in_the_same_order_with_fewer_calls(takes_index: bool) -> None:
    assert _fit(True, takes_index) == _fit(False, takes_index)


def test_the_hooks_that_are_left_out_do_nothing() -> None:
    for name in _lightning_hooks.EMPTY_HOOKS:
        hook = getattr(pl.LightningModule, name)
        assert hook.__code__.co_names == (), name
        assert set(hook.__code__.co_consts) <= {hook.__doc__, None}, name
        assert callable(getattr(pl.Callback, name))


def test_a_profiler_and_the_log_at_level_debug_get_what_lightning_gives_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = one_process_trainer(max_steps=2, profiler=SimpleProfiler())
    with _lightning_hooks.call_overridden_hooks(trainer):
        trainer.fit(Model(True), DataLoader(torch.ones(4, 2)))
    assert (
        len(trainer.profiler.recorded_durations["[LightningModule]Model.on_before_zero_grad"]) == 2
    )

    trainer = one_process_trainer(max_steps=2)
    with (
        caplog.at_level(logging.DEBUG, call.log.name),
        _lightning_hooks.call_overridden_hooks(trainer),
    ):
        trainer.fit(Model(True), DataLoader(torch.ones(4, 2)))
    assert "calling lightning module hook: on_before_zero_grad" in caplog.text


def test_another_trainer_and_a_trainer_after_its_undo_are_lightning_s() -> None:
    first, second = (one_process_trainer(max_steps=1) for _ in range(2))
    hook = call._call_callback_hooks
    with _lightning_hooks.call_overridden_hooks(first):
        assert not set(vars(second.profiler)) & {"profile"}
        assert call._call_callback_hooks is not hook
    assert call._call_callback_hooks is hook
    assert not any(name.startswith("_calls_hooks") for name in vars(first))
    assert "_build_kwargs" not in vars(first.fit_loop.epoch_loop)


def test_lightnings_command_line_reads_checkpoints_in_the_method_that_is_replaced() -> None:
    @_lightning_checkpoints.reads_hyperparameters
    class Reader(LightningCLI):
        def read_hyperparameters(self, checkpoint: Any) -> None:
            raise SystemExit(f"reads {checkpoint}")

    assert "hyper_parameters" in inspect.getsource(LightningCLI._parse_ckpt_path)
    with pytest.raises(SystemExit, match="reads some.ckpt"):
        Reader(BoringModel, args=["fit", "--ckpt_path=some.ckpt"])
