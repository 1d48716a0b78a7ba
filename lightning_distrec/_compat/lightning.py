"""Private names of lightning: loops, connectors and hooks that have no public interface."""

import inspect
import logging
import signal
from collections.abc import Callable
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch
from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer, _init_optimizers_and_lr_schedulers
from lightning.pytorch.loops import evaluation_loop, fetchers, fit_loop, prediction_loop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.optim import Optimizer

from lightning_distrec._compat.patches import Patches

DataFetcher = fetchers._DataFetcher
"""Base class of the fetchers from which Lightning's loops take their batches."""


def init_optimizers_and_schedulers(
    module: Any, check: Callable[[Any], None] = lambda _: None
) -> tuple[list[Optimizer], list[Any]]:
    """Call the module's configure_optimizers and return its unwrapped optimizers and its scheduler
    configs.

    check: called with what it has returned, before Lightning reads it.
    """

    def configure_optimizers() -> Any:
        configured = original()
        check(configured)
        return configured

    original = module.configure_optimizers
    # Source: lightning/pytorch/core/optimizer.py; Strategy.setup_optimizers calls the same
    # function.
    with Patches() as patches:
        patches.replace(module, "configure_optimizers", configure_optimizers)
        optimizers, schedulers = _init_optimizers_and_lr_schedulers(module)
    return [o.optimizer if isinstance(o, LightningOptimizer) else o for o in optimizers], schedulers


def skip_order_check(optimizer: Optimizer) -> None:
    """Let torch's schedulers not warn that they step before this optimizer. Source:
    torch/optim/lr_scheduler.py."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


move_optimizers_to_device = _optimizers_to_device
"""Moves the optimizers' state to a device."""

AVERAGE = "_average_model"
"""The attribute in which WeightAveraging and StochasticWeightAveraging hold their averaged copy;
None before setup.

They call its `to`, `parameters` and `state_dict`.
"""

PRUNED = "_parameters_to_prune"
"""The attribute in which ModelPruning holds pairs of a module and the name of its parameter, from
its setup on."""

unscales_in_step = _optimizer_handles_unscaling
"""Returns whether an optimizer unscales gradients inside of `step`, as torch's fused ones do."""


_ONLY_ON_RANK_ZERO = rank_zero_only(print).__code__


def is_for_rank_zero() -> bool:
    """Return whether this code runs inside of a function that `rank_zero_only` decorates, as
    loggers' are."""
    # Source: lightning_utilities/core/rank_zero.py, whose wrapper leaves no other trace.
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _ONLY_ON_RANK_ZERO:
        frame = frame.f_back
    return frame is not None


def call_after_closure(plugin: Any, call: Callable[[], None]) -> Patches:
    """Call `call` in each optimizer step after the closure and the hooks behind it, before the
    update."""
    # Source: lightning/pytorch/plugins/precision/precision.py, whose subclasses call the same
    # method.
    after_closure = plugin._after_closure

    def called(*args: Any) -> None:
        after_closure(*args)
        call()

    patches = Patches()
    patches.replace(plugin, "_after_closure", called)
    return patches


def set_device_and_mesh(module: Any, device: torch.device, mesh: Any) -> None:
    """Set a LightningModule's `device` and `device_mesh`; its `to` would set the first, and move
    all tensors too."""
    # Source: lightning/fabric/utilities/device_dtype_mixin.py, lightning/pytorch/core/module.py.
    _update_properties(module, device=device)
    module._device_mesh = mesh


def wrapped_optimizers(strategy: Any) -> list[Any]:
    """Return the LightningOptimizers of a strategy; their `zero_grad` is not that of the wrapped
    optimizer."""
    # Source: lightning/pytorch/strategies/strategy.py, lightning/pytorch/core/optimizer.py.
    return list(strategy._lightning_optimizers)


def train_dataloaders(trainer: Any) -> Any:
    """Return the training dataloaders, requested once more as Lightning does; None where there are
    none."""
    # Source: lightning/pytorch/loops/fit_loop.py, setup_data.
    source = trainer.fit_loop._data_source
    return (
        _request_dataloader(source) if source.instance is not None and source.is_defined() else None
    )


def given_train_loaders(trainer: Any) -> Any:
    """Return the training dataloaders that `fit` was given; None where a hook makes them."""
    # Source: lightning/pytorch/trainer/connectors/data_connector.py, attach_dataloaders.
    instance = trainer.fit_loop._data_source.instance
    return None if hasattr(instance, "train_dataloader") else instance


def replace_fetchers(trainer: Any, make: Callable[[Any], Any]) -> Patches:
    """Let the trainer's loops take their data fetchers from `make`, called with a stage."""
    # Upstream chooses among its own fetchers, which draw one batch ahead and cannot prepare
    # lookups. A step that takes a dataloader_iter, and other trainers, keep upstream's choice. The
    # loops read `_select_data_fetcher` from the globals of their modules. Can go when a strategy
    # can give a fetcher.
    # Source: lightning/pytorch/loops/utilities.py.
    original = fit_loop.__dict__["_select_data_fetcher"]

    def select(running_trainer: Any, stage: Any) -> Any:
        fetcher = original(running_trainer, stage)
        if (
            isinstance(fetcher, fetchers._DataLoaderIterDataFetcher)
            or running_trainer is not trainer
        ):
            return fetcher
        return make(stage)

    patches = Patches()
    for module in (evaluation_loop, fit_loop, prediction_loop):
        patches.replace(module, "_select_data_fetcher", select)
    return patches


def skip_transfer_hook_when(module: Any, is_done: Callable[[Any], bool]) -> Patches:
    """Skip the user's on_before_batch_transfer for batches for which `is_done` returns True."""
    # Upstream: every loop calls it just before Strategy.batch_to_device. Batches in flight have
    # been through it when they were fetched. Can go when fetchers can move batches to the device.
    # Source: lightning/pytorch/core/module.py.
    hook = module._on_before_batch_transfer

    def once(batch: Any, dataloader_idx: int = 0) -> Any:
        return batch if is_done(batch) else hook(batch, dataloader_idx)

    patches = Patches()
    patches.replace(module, "_on_before_batch_transfer", once)
    return patches


def call_transfer_hook(module: Any, batch: Any, dataloader_idx: int) -> Any:
    """Call the user's on_before_batch_transfer, which the module or its data module may define."""
    return type(module)._on_before_batch_transfer(module, batch, dataloader_idx)


def override_environment_choice(
    is_ours: Callable[[Any], bool], choose: Callable[[], Any]
) -> Patches:
    """Let `choose` return the cluster environment of a Trainer whose strategy, or its name,
    `is_ours`.

    An environment that the user passes as a plugin stays, and so does everything for other
    strategies. An instance of ours that another Trainer has had is asked to leave it, by its method
    `leave_trainer`.
    """
    # Upstream chooses by the first environment whose `detect` is True, before it creates the
    # strategy, and some of them raise in their constructor, so that a strategy cannot correct the
    # choice later. And it takes what a Trainer has given a strategy for what the user has, which
    # conflicts with the flags of another Trainer. Can go when Lightning lets a strategy choose its
    # environment, and takes a strategy twice.
    # Source: lightning/pytorch/trainer/connectors/accelerator_connector.py,
    # `_choose_and_init_cluster_environment`, `_check_config_and_set_final_flags`.
    original = _AcceleratorConnector._choose_and_init_cluster_environment
    check = _AcceleratorConnector._check_config_and_set_final_flags

    def choose_for_ours(self: Any) -> Any:
        if self._cluster_environment_flag is None and is_ours(self._strategy_flag):
            return choose()
        return original(self)

    def check_flags(self: Any, strategy: Any, **flags: Any) -> None:
        if is_ours(strategy) and hasattr(strategy, "leave_trainer"):
            strategy.leave_trainer()
        check(self, strategy, **flags)

    patches = Patches()
    patches.replace(_AcceleratorConnector, "_choose_and_init_cluster_environment", choose_for_ours)
    patches.replace(_AcceleratorConnector, "_check_config_and_set_final_flags", check_flags)
    return patches


def mark_stop(trainer: Any) -> None:
    """Set the flag by which Lightning's loops stop after SIGTERM."""
    trainer._signal_connector.received_sigterm = True


def stop_between_steps(
    trainer: Any, record: Callable[[bool], None], leave: Callable[[], int | None]
) -> Patches:
    """Let signals only call `record`, and call `leave` before each of the trainer's steps.

    record: gets True for the signal by which Slurm requeues a job, False for SIGTERM.
    leave: returns the exit code with which the process is to end, or None to go on.
    """
    # Upstream: the handlers run collectives (a broadcast, saving) inside of the signal, wherever
    # the rank is, so that ranks that are hit at different points deadlock; and the training loop
    # broadcasts rank 0's flag at every step and waits for it. Can go when Lightning's handlers only
    # set a flag and its loop asks the strategy about it.
    # Source: lightning/pytorch/loops/training_epoch_loop.py, `advance`, and signal_connector.py,
    # whose `register_signal_handlers` runs after the strategy's setup.
    connector = trainer._signal_connector
    loop = trainer.fit_loop.epoch_loop
    advance = loop.advance

    def terminate(signum: int, frame: Any) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None and not connector.received_sigterm:
            launcher.kill(signum)
        record(False)

    def requeue(signum: int, frame: Any) -> None:
        record(True)

    def look_first(data_fetcher: Any) -> None:
        code = leave()
        if code is not None:
            mark_stop(trainer)
            raise SIGTERMException(code)
        advance(data_fetcher)

    patches = Patches()
    patches.replace(connector, "_sigterm_notifier_fn", terminate)
    patches.replace(connector, "_slurm_sigusr_handler_fn", requeue)
    patches.replace(loop, "_broadcast_sigterm_tensor", lambda: None)
    patches.replace(loop, "advance", look_first)
    return patches


def batches_that_stepped(trainer: Any) -> int:
    """Return the step, counted from 0, that Lightning's loggers get for the batch in progress."""
    # Source: lightning/pytorch/loops/training_epoch_loop.py; LearningRateMonitor uses it in the
    # same way.
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def ignore_signal_after_run(trainer: Any, signum: int) -> Patches:
    """Let a signal by which a scheduler warns end no process once the run has ended; a handler of
    the user's stays."""
    # Upstream puts back what was there before the run, which ends the process. It takes any handler
    # for the user's, so that ours goes before it installs its own. Source: signal_connector.py,
    # `register_signal_handlers`, `teardown`.
    if signal.getsignal(signum) is _ignore:
        signal.signal(signum, signal.SIG_DFL)
    patches = Patches()

    def leave() -> None:
        handlers = trainer._signal_connector._original_handlers
        if handlers.get(signum) is signal.SIG_DFL:
            handlers[signum] = _ignore

    patches.callback(leave)
    return patches


def _ignore(signum: int, frame: Any) -> None:
    """Do nothing; the processes that this one starts do not inherit it, as they do SIG_IGN."""


def show_in_progress_bar(trainer: Any, name: str, value: str) -> None:
    """Show `value` among the metrics of the progress bar."""
    # `LightningModule.log(prog_bar=True)` would create a tensor on the device and read it back.
    # Source: lightning/pytorch/trainer/connectors/logger_connector/logger_connector.py,
    # progress_bar_metrics.
    trainer._logger_connector._progress_bar_metrics[name] = value


_MARK = "_calls_hooks_that_are_overridden"
_callback_hooks = call._call_callback_hooks
_module_hook = call._call_lightning_module_hook
_strategy_hook = call._call_strategy_hook
_OF_CALLBACKS = {name: hook for name, hook in vars(Callback).items() if callable(hook)}
EMPTY_HOOKS = (
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *(
        f"on_{kind}_batch_{when}"
        for kind in ("train", "validation", "test", "predict")
        for when in ("start", "end")
    ),
)
"""Hooks of LightningModule that do nothing unless they are overridden, of those that are called in
every step."""
_NO_HOOK = object()
_MODULE_OF = attrgetter("_accelerator_connector.strategy._lightning_module")
"""As trainer.lightning_module, past three properties."""
_OF_MODULES = {name: getattr(LightningModule, name) for name in EMPTY_HOOKS}


def call_overridden_hooks(trainer: Any) -> Patches:
    """Let the trainer's loops call hooks that somebody overrides, and build no context without a
    profiler."""
    # A step has 22 hooks. Upstream formats a log line for each, enters a generator for the
    # profiler, and sets the hook's name on the module, for `self.log`, through nn.Module's
    # __setattr__, whether or not the hook does anything. Here the name is written past __setattr__,
    # and a hook that is Lightning's own empty one is left out. With another profiler, or where that
    # log is at level DEBUG now, upstream's functions run.
    # Source: lightning/pytorch/trainer/call.py; _build_kwargs in
    # lightning/pytorch/loops/training_epoch_loop.py, which inspects the signature of training_step
    # in every step. Can go when Lightning does so.
    patches = Patches()
    if type(trainer.profiler) is not PassThroughProfiler or call.log.isEnabledFor(logging.DEBUG):
        return patches
    patches.replace(call, "_call_callback_hooks", _call_callbacks)
    patches.replace(call, "_call_lightning_module_hook", _call_module)
    patches.replace(call, "_call_strategy_hook", _call_strategy)
    patches.replace(trainer, _MARK, True)
    # Upstream's context does nothing but yield the name that it is given.
    patches.replace(trainer.profiler, "profile", nullcontext)
    loop = trainer.fit_loop.epoch_loop
    patches.replace(loop, "_build_kwargs", _KeptSignature(loop))
    return patches


def _call_callbacks(
    trainer: Any,
    hook_name: str,
    *args: Any,
    monitoring_callbacks: bool | None = None,
    **kwargs: Any,
) -> None:
    if monitoring_callbacks is not None or _MARK not in trainer.__dict__:
        _callback_hooks(
            trainer, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs
        )
        return
    empty = _OF_CALLBACKS.get(hook_name)
    module = None
    caller = None
    for callback in trainer.callbacks:
        if getattr(type(callback), hook_name, None) is empty and hook_name not in callback.__dict__:
            continue
        if module is None:
            module = _MODULE_OF(trainer)
            caller = module._current_fx_name
            # Past nn.Module.__setattr__, which looks for parameters and modules first, in every
            # hook of every step.
            module.__dict__["_current_fx_name"] = hook_name
        hook = getattr(callback, hook_name)
        if callable(hook):
            hook(trainer, module, *args, **kwargs)
    if module is not None:
        module.__dict__["_current_fx_name"] = caller


def _call_module(
    trainer: Any, hook_name: str, *args: Any, pl_module: Any = None, **kwargs: Any
) -> Any:
    module = _MODULE_OF(trainer) if pl_module is None else pl_module
    if module is None or _MARK not in trainer.__dict__:
        return _module_hook(trainer, hook_name, *args, pl_module=pl_module, **kwargs)
    attributes = module.__dict__
    # A hook may also be set on the instance, as tests and notebooks do.
    if hook_name not in attributes and getattr(type(module), hook_name, None) is _OF_MODULES.get(
        hook_name, _NO_HOOK
    ):
        return None
    hook = getattr(module, hook_name)
    if not callable(hook):
        return None
    caller = module._current_fx_name
    attributes["_current_fx_name"] = hook_name
    output = hook(*args, **kwargs)
    attributes["_current_fx_name"] = caller
    return output


def _call_strategy(trainer: Any, hook_name: str, *args: Any, **kwargs: Any) -> Any:
    if _MARK not in trainer.__dict__:
        return _strategy_hook(trainer, hook_name, *args, **kwargs)
    module = _MODULE_OF(trainer)
    caller = module._current_fx_name
    module.__dict__["_current_fx_name"] = hook_name
    hook = getattr(trainer.strategy, hook_name)
    if not callable(hook):
        return None
    output = hook(*args, **kwargs)
    module.__dict__["_current_fx_name"] = caller
    return output


class _KeptSignature:
    """A loop's `_build_kwargs`, which inspects training_step again only when it is another one."""

    def __init__(self, loop: Any) -> None:
        self._loop = loop
        self._step: Any = None
        self._takes_index = False

    def __call__(self, kwargs: Any, batch: Any, batch_idx: int) -> Any:
        module = _MODULE_OF(self._loop.trainer)
        step = module.__dict__.get("training_step") or type(module).training_step
        # The signature is read again where the user, or a callback, has replaced the step.
        if step is not self._step:
            kwargs = _TrainingEpochLoop._build_kwargs(self._loop, kwargs, batch, batch_idx)
            self._step = step
            self._takes_index = "batch_idx" in kwargs
            return kwargs
        kwargs["batch"] = batch
        if self._takes_index:
            kwargs["batch_idx"] = batch_idx
        return kwargs
