"""Decides whether tables may be updated inside of backward, and refuses what would not be exact with that."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_distrec.errors import UnsupportedError

GRADIENT_HOOKS = (
    "backward",
    "on_after_backward",
    "configure_gradient_clipping",
    "on_before_optimizer_step",
    "optimizer_step",
    "optimizer_zero_grad",
)
"""Hooks of a LightningModule that may look at gradients, change them, or step at other times than Lightning."""


def why_not_in_backward(trainer: Trainer, module: LightningModule, precision: Precision) -> str:
    """Return why the tables' updates must wait for `optimizer.step()`, or "" where they may run inside of backward."""
    if not module.automatic_optimization:
        # Whether every step follows a backward of its own shows when it is too late; ManualWatch checks it on request.
        return "manual optimization; fused on request"
    max_accumulated = _max_accumulated(trainer)
    if max_accumulated > 1:
        return f"accumulate_grad_batches={max_accumulated}"
    if trainer.gradient_clip_val:
        return f"gradient_clip_val={trainer.gradient_clip_val}"
    if getattr(precision, "scaler", None) is not None:
        return "loss scaling may skip steps"
    hooks = gradient_hooks(trainer, module)
    return f"{hooks[0]} is overridden" if hooks else ""


def refuse_what_is_not_exact(trainer: Trainer, precision: Precision, kinds: Mapping[str, str]) -> None:
    """Raise UnsupportedError where a setting of the Trainer would give other numbers than an unsharded run.

    kinds: full name of a table -> what updates it ("fused", "dense", ...).
    """
    fused = [name for name, kind in kinds.items() if kind in ("fused", "fused_lazy")]
    if not fused:
        return
    max_accumulated = _max_accumulated(trainer)
    if max_accumulated > 1:
        raise UnsupportedError(
            f"accumulate_grad_batches={max_accumulated}: table '{fused[0]}' is updated inside of backward, at every "
            "batch, because embedding_update asks for it. Set embedding_update='auto', or accumulate_grad_batches=1."
        )
    if trainer.gradient_clip_val:
        refuse_clip(trainer.gradient_clip_val, fused)
    if getattr(precision, "scaler", None) is not None:
        raise UnsupportedError(
            f"precision={trainer.precision!r} scales the loss and may skip steps, but table '{fused[0]}' is updated "
            "inside of backward, because embedding_update asks for it. Set embedding_update='auto', or use "
            "'bf16-mixed'."
        )


def gradient_hooks(trainer: Trainer, module: LightningModule) -> list[str]:
    """Return the hooks around gradients and steps that the module or a callback of the user overrides."""
    hooks = [hook for hook in GRADIENT_HOOKS if is_overridden(hook, module)]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, LambdaCallback) or not type(callback).__module__.startswith("lightning."):
            name = type(callback).__name__
            hooks += [
                f"{name}.{hook}"
                for hook in ("on_after_backward", "on_before_optimizer_step")
                if is_overridden(hook, callback, parent=Callback)
            ]
    return hooks


def hooks_without_gradients(trainer: Trainer, module: LightningModule, fused: list[str]) -> str | None:
    """Return a warning for users whose hooks would miss the gradients of tables that are fused on request, or None."""
    hooks = gradient_hooks(trainer, module)
    if not hooks or not fused:
        return None
    return (
        f"{' and '.join(hooks)} may look at gradients, but table '{fused[0]}' has none: it is updated inside of "
        "backward, because embedding_update asks for it. Where the hook must reach it, set embedding_update='auto'."
    )


def refuse_clip(value: Any, fused: list[str]) -> None:
    """Raise UnsupportedError where a table would be updated before its gradient is clipped."""
    if value and fused:
        raise UnsupportedError(
            f"gradient_clip_val={value}: table '{fused[0]}' is updated inside of backward, before gradients are "
            "clipped, because embedding_update asks for it. Set embedding_update='auto', or remove gradient_clip_val."
        )


def _max_accumulated(trainer: Trainer) -> int:
    schedules = [c.scheduling for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)]  # type: ignore[attr-defined]
    return max([trainer.accumulate_grad_batches, *(n for schedule in schedules for n in schedule.values())])
