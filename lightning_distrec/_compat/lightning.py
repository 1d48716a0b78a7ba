"""Private names of lightning: the loops, connectors and hooks that have no public way in."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.loops import fetchers
from torch import nn
from torch.optim import Optimizer

DataFetcher = fetchers._DataFetcher
"""What Lightning's loops draw their batches from."""


def init_optimizers_and_schedulers(module: Any) -> tuple[list[Optimizer], list[Any]]:
    """Call the module's configure_optimizers and return its optimizers, unwrapped, and scheduler configs.

    Source: lightning/pytorch/core/optimizer.py; Strategy.setup_optimizers calls the same function.
    """
    from lightning.pytorch.core.optimizer import LightningOptimizer, _init_optimizers_and_lr_schedulers

    optimizers, schedulers = _init_optimizers_and_lr_schedulers(module)
    return [o.optimizer if isinstance(o, LightningOptimizer) else o for o in optimizers], schedulers


def move_optimizers_to_device(optimizers: list[Optimizer], device: torch.device) -> None:
    """Move the optimizers' state to `device`. Source: lightning/fabric/utilities/optimizer.py."""
    from lightning.fabric.utilities.optimizer import _optimizers_to_device

    _optimizers_to_device(optimizers, device)


def average_model(callback: Any) -> nn.Module | None:
    """Return what WeightAveraging or StochasticWeightAveraging keeps its average in; None before its setup.

    Source: lightning/pytorch/callbacks/weight_averaging.py and stochastic_weight_avg.py.
    """
    model: nn.Module | None = callback._average_model
    return model


def set_average_model(callback: Any, model: nn.Module) -> None:
    """Make the callback keep its average in `model`; of it, it uses `to`, `parameters` and `state_dict`."""
    callback._average_model = model


def unscales_in_step(optimizer: Optimizer) -> bool:
    """Whether the optimizer looks for overflows inside of `step`, as torch's fused ones do.

    Source: lightning/fabric/plugins/precision/amp.py.
    """
    from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling

    return bool(_optimizer_handles_unscaling(optimizer))


def set_device_and_mesh(module: Any, device: torch.device, mesh: Any) -> None:
    """Let a LightningModule's `device` and `device_mesh` be these; its `to` does it for the first, with all tensors.

    Source: lightning/fabric/utilities/device_dtype_mixin.py, lightning/pytorch/core/module.py.
    """
    from lightning.fabric.utilities.device_dtype_mixin import _update_properties

    _update_properties(module, device=device)
    module._device_mesh = mesh


def wrapped_optimizers(strategy: Any) -> list[Any]:
    """Return the LightningOptimizers of a strategy, whose `zero_grad` is not the wrapped optimizer's own.

    Source: lightning/pytorch/strategies/strategy.py, lightning/pytorch/core/optimizer.py.
    """
    return list(strategy._lightning_optimizers)


def train_dataloaders(trainer: Any) -> Any:
    """Return what there is to train on, asked for once more as Lightning does; None where there is nothing.

    Source: lightning/pytorch/loops/fit_loop.py, setup_data.
    """
    from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader

    source = trainer.fit_loop._data_source
    return _request_dataloader(source) if source.instance is not None and source.is_defined() else None


def combining_mode(combined_loader: Any) -> str:
    """Return how Lightning's CombinedLoader combines its loaders: "min_size", "sequential", ..."""
    return str(combined_loader._mode)


def loader_states(combined_loader: Any) -> list[dict[str, Any]]:
    """Return the states of the loaders that have one. Source: lightning/pytorch/utilities/combined_loader.py."""
    states: list[dict[str, Any]] = type(combined_loader)._state_dicts(combined_loader)
    return states


def override_loader_states(combined_loader: Any, states: Callable[[], list[dict[str, Any]]] | None) -> None:
    """Make checkpoints hold these states of the loaders, in place of those that they have themselves; None undoes it.

    Source: lightning/pytorch/loops/fit_loop.py asks for them when a checkpoint is saved.
    """
    if states is not None:
        combined_loader._state_dicts = states
    else:
        combined_loader.__dict__.pop("_state_dicts", None)


def replace_fetchers(trainer: Any, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Let `make`, called with a stage, give the trainer's loops the fetchers of their data; returns an undo.

    It is not asked about steps that take a dataloader_iter.
    Source: lightning/pytorch/loops/utilities.py; the loops find `_select_data_fetcher` among their modules' globals,
    which is replaced once, by one that looks whether the trainer has a `make`.
    """
    from lightning.pytorch.loops import evaluation_loop, fit_loop, prediction_loop
    from lightning.pytorch.loops.utilities import _select_data_fetcher

    def select(of: Any, stage: Any) -> Any:
        chosen = _select_data_fetcher(of, stage)
        if isinstance(chosen, fetchers._DataLoaderIterDataFetcher) or of not in _makers:
            return chosen
        return _makers[of](stage)

    if fit_loop.__dict__["_select_data_fetcher"] is _select_data_fetcher:
        for module in (evaluation_loop, fit_loop, prediction_loop):
            module.__dict__["_select_data_fetcher"] = select
    _makers[trainer] = make

    def undo() -> None:
        _makers.pop(trainer, None)

    return undo


_makers: WeakKeyDictionary[Any, Callable[[Any], Any]] = WeakKeyDictionary()


def skip_transfer_hook_when(module: Any, is_done: Callable[[Any], bool]) -> Callable[[], None]:
    """Do not call the user's on_before_batch_transfer for batches that are done with it; returns an undo.

    Source: lightning/pytorch/core/module.py; every loop calls it just before Strategy.batch_to_device.
    """
    hook = module._on_before_batch_transfer

    def once(batch: Any, dataloader_idx: int = 0) -> Any:
        return batch if is_done(batch) else hook(batch, dataloader_idx)

    module.__dict__["_on_before_batch_transfer"] = once

    def undo() -> None:
        module.__dict__.pop("_on_before_batch_transfer", None)

    return undo


def call_transfer_hook(module: Any, batch: Any, dataloader_idx: int) -> Any:
    """Call the user's on_before_batch_transfer, of the module or its data module."""
    return type(module)._on_before_batch_transfer(module, batch, dataloader_idx)


def override_environment_choice(is_ours: Callable[[Any], bool], choose: Callable[[], Any]) -> None:
    """Let `choose` decide about the cluster environment of a Trainer whose strategy `is_ours`.

    is_ours: told the strategy's name, or the strategy. What the user passes as a plugin stays, and so does everything
    for other strategies. Lightning decides before it makes the strategy, and some of its environments raise when they
    are made, so that a strategy cannot mend it later. Once for each process.
    Source: lightning/pytorch/trainer/connectors/accelerator_connector.py, `_choose_and_init_cluster_environment`.
    """
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    theirs = _AcceleratorConnector._choose_and_init_cluster_environment
    if hasattr(theirs, "theirs"):
        return

    def ours(self: Any) -> Any:
        if self._cluster_environment_flag is None and is_ours(self._strategy_flag):
            return choose()
        return theirs(self)

    ours.theirs = theirs  # type: ignore[attr-defined]
    _AcceleratorConnector._choose_and_init_cluster_environment = ours  # type: ignore[method-assign]


def mark_stop(trainer: Any) -> None:
    """Let Lightning's loops know that all ranks stop."""
    trainer._signal_connector.received_sigterm = True


def stop_between_steps(
    trainer: Any, asked: Callable[[bool], None], leave: Callable[[], int | None]
) -> Callable[[], None]:
    """Let signals only be noted, with `asked`, and call `leave` between the trainer's steps; returns an undo.

    asked: called with whether it was the signal that Slurm requeues by, and not SIGTERM. leave: returns the code with
    which the process is to end, None where it goes on.
    Lightning's handlers broadcast, and save, from inside of the signal, wherever the rank is, and its training loop
    broadcasts rank 0's flag at every step and waits for it. Source: lightning/pytorch/loops/training_epoch_loop.py,
    `advance`, and lightning/pytorch/trainer/connectors/signal_connector.py, whose `register_signal_handlers` runs after
    the strategy's setup.
    """
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    advance = loop.advance

    def terminate(signum: int, frame: Any) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None and not connector.received_sigterm:
            launcher.kill(signum)
        asked(False)

    def requeue(signum: int, frame: Any) -> None:
        asked(True)

    def look_first(data_fetcher: Any) -> None:
        if (code := leave()) is not None:
            mark_stop(trainer)
            raise SIGTERMException(code)
        advance(data_fetcher)

    connector.__dict__["_sigterm_notifier_fn"] = terminate
    connector.__dict__["_slurm_sigusr_handler_fn"] = requeue
    loop.__dict__["_broadcast_sigterm_tensor"] = lambda: None
    loop.__dict__["advance"] = look_first

    def undo() -> None:
        for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
            connector.__dict__.pop(name, None)
        for name in ("_broadcast_sigterm_tensor", "advance"):
            loop.__dict__.pop(name, None)

    return undo


def resume_from(trainer: Any, find: Callable[[], str | None]) -> None:
    """Let a fit without ckpt_path go on from the checkpoint that `find` returns; None: from none, by itself.

    Lightning takes any `hpc_ckpt_*` in the folder, whichever job has left it, where it believes to be in Slurm.
    Source: lightning/pytorch/trainer/connectors/checkpoint_connector.py, `_parse_ckpt_path`.
    """
    from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

    class Resumes(_CheckpointConnector):
        @property
        def _hpc_resume_path(self) -> str | None:
            return find()

        def _parse_ckpt_path(self, state_fn: Any, ckpt_path: Any, *args: Any, **options: Any) -> Any:
            if ckpt_path is None and state_fn == "fit" and find() is not None:
                ckpt_path = "hpc"
            return super()._parse_ckpt_path(state_fn, ckpt_path, *args, **options)

    trainer._checkpoint_connector.__class__ = Resumes


def batches_that_stepped(trainer: Any) -> int:
    """Return the number that Lightning gives its loggers as the step of the batch in progress, counted from 0.

    Source: lightning/pytorch/loops/training_epoch_loop.py; LearningRateMonitor uses it in the same way.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def show_in_progress_bar(trainer: Any, name: str, value: str) -> None:
    """Show `value` beside the other metrics of the progress bar.

    `LightningModule.log(prog_bar=True)` would make a tensor on the device and read it back, which waits for a GPU.
    Source: lightning/pytorch/trainer/connectors/logger_connector/logger_connector.py, progress_bar_metrics.
    """
    trainer._logger_connector._progress_bar_metrics[name] = value
