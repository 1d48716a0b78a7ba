"""Private names of lightning: how its loops call hooks in a step, at less Python where nobody listens."""

import logging
from contextlib import nullcontext
from operator import attrgetter
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.trainer import call

from lightning_distrec._compat.patches import Patches

_MARK = "_calls_hooks_that_are_overridden"
_callback_hooks, _module_hook, _strategy_hook = (
    call._call_callback_hooks,
    call._call_lightning_module_hook,
    call._call_strategy_hook,
)
_OF_CALLBACKS = {name: hook for name, hook in vars(Callback).items() if callable(hook)}
EMPTY_HOOKS = (
    *("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *(f"on_{kind}_batch_{when}" for kind in ("train", "validation", "test", "predict") for when in ("start", "end")),
)
"""Hooks of LightningModule that do nothing unless they are overridden, of those that are called in every step."""
_NO_HOOK = object()
_MODULE_OF = attrgetter("_accelerator_connector.strategy._lightning_module")
"""As trainer.lightning_module, past three properties."""
_OF_MODULES = {name: getattr(LightningModule, name) for name in EMPTY_HOOKS}


def call_overridden_hooks(trainer: Any) -> Patches:
    """Let the trainer's loops call hooks that somebody overrides, and build no context without a profiler.

    A step has 22 hooks. Upstream formats a log line for each, enters a generator for the profiler, and sets the hook's
    name on the module, for `self.log`, through nn.Module's __setattr__, whether or not the hook does anything. Here
    the name is written past __setattr__, and a hook that is Lightning's own empty one is left out; nothing else
    differs. With another profiler, or where that log is at level DEBUG now, upstream's functions run.
    Source: lightning/pytorch/trainer/call.py; _build_kwargs in lightning/pytorch/loops/training_epoch_loop.py, which
    inspects the signature of training_step in every step. Can go when Lightning does so.
    """
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
    trainer: Any, hook_name: str, *args: Any, monitoring_callbacks: bool | None = None, **kwargs: Any
) -> None:
    if monitoring_callbacks is not None or _MARK not in trainer.__dict__:
        _callback_hooks(trainer, hook_name, *args, monitoring_callbacks=monitoring_callbacks, **kwargs)
        return
    empty, module, caller = _OF_CALLBACKS.get(hook_name), None, None
    for callback in trainer.callbacks:
        if getattr(type(callback), hook_name, None) is empty and hook_name not in callback.__dict__:
            continue
        if module is None:
            module = _MODULE_OF(trainer)
            caller = module._current_fx_name
            module.__dict__["_current_fx_name"] = hook_name
        hook = getattr(callback, hook_name)
        if callable(hook):
            hook(trainer, module, *args, **kwargs)
    if module is not None:
        module.__dict__["_current_fx_name"] = caller


def _call_module(trainer: Any, hook_name: str, *args: Any, pl_module: Any = None, **kwargs: Any) -> Any:
    module = _MODULE_OF(trainer) if pl_module is None else pl_module
    if module is None or _MARK not in trainer.__dict__:
        return _module_hook(trainer, hook_name, *args, pl_module=pl_module, **kwargs)
    attributes = module.__dict__
    if hook_name not in attributes and getattr(type(module), hook_name, None) is _OF_MODULES.get(hook_name, _NO_HOOK):
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
        if step is not self._step:
            kwargs = _TrainingEpochLoop._build_kwargs(self._loop, kwargs, batch, batch_idx)
            self._step, self._takes_index = step, "batch_idx" in kwargs
            return kwargs
        kwargs["batch"] = batch
        if self._takes_index:
            kwargs["batch_idx"] = batch_idx
        return kwargs
