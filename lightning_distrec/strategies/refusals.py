"""What cannot be exact over sharded tables yet, refused by name before the first step, with the way out."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_distrec.errors import UnsupportedError

EXACT_PRECISIONS = ("32-true", "bf16-mixed")


def refuse_what_is_not_exact(trainer: Trainer, module: LightningModule, kinds: Mapping[str, str]) -> None:
    """Raise UnsupportedError where a setting of the Trainer would give other numbers than an unsharded run.

    kinds: full name of a table -> what updates it ("fused", "dense", ...).
    """
    fused = [name for name, kind in kinds.items() if kind in ("fused", "fused_lazy")]
    _refuse_accumulation(trainer, fused)
    _refuse_clipping(trainer, module, fused)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, (StochasticWeightAveraging, WeightAveraging)):
            raise UnsupportedError(
                f"callback {type(callback).__name__}: averaged copies of a sharded module are not supported yet. "
                "Remove the callback."
            )


def refuse_precision(trainer: Trainer) -> None:
    """Raise UnsupportedError where the precision would turn the tables into a type that was not measured."""
    precision = str(trainer.precision)
    if precision not in EXACT_PRECISIONS:
        raise UnsupportedError(
            f"Trainer(precision={precision!r}) is not exact over sharded tables yet. Use 'bf16-mixed' or '32-true'."
        )


def gradient_hooks(module: LightningModule, fused: list[str]) -> str | None:
    """Return what to tell the user about hooks that may change gradients, which fused tables do not keep, or None."""
    hooks = [name for name in ("on_after_backward", "on_before_optimizer_step") if is_overridden(name, module)]
    if not hooks or not fused:
        return None
    return (
        f"{' and '.join(hooks)} may look at gradients, but changing them does not reach table '{fused[0]}', which "
        "is updated inside of backward. Where it must, set embedding_update='dense'."
    )


def _refuse_accumulation(trainer: Trainer, fused: list[str]) -> None:
    schedules = [c.scheduling for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)]  # type: ignore[attr-defined]
    most = max([trainer.accumulate_grad_batches, *(n for schedule in schedules for n in schedule.values())])
    if most > 1 and fused:
        raise UnsupportedError(
            f"accumulate_grad_batches={most}: table '{fused[0]}' is updated inside of backward, at every batch. "
            "Set embedding_update='dense' (the user's optimizer on local shards), or accumulate_grad_batches=1."
        )


def _refuse_clipping(trainer: Trainer, module: LightningModule, fused: list[str]) -> None:
    if trainer.gradient_clip_val:
        refuse_clip(trainer.gradient_clip_val, trainer.gradient_clip_algorithm, fused)
    if is_overridden("configure_gradient_clipping", module):
        raise UnsupportedError(
            "configure_gradient_clipping is overridden: gradients of sharded tables are not all on one rank, so their "
            "norm is not either. Remove the override."
        )


def refuse_clip(value: Any, algorithm: Any, fused: list[str]) -> None:
    """Raise UnsupportedError where clipping by this algorithm would differ from the unsharded run."""
    by_value = algorithm is not None and GradClipAlgorithmType(algorithm) == GradClipAlgorithmType.VALUE
    if fused:
        raise UnsupportedError(
            f"gradient_clip_val={value}: table '{fused[0]}' is updated inside of backward, before gradients are "
            "clipped. Set embedding_update='dense' and gradient_clip_algorithm='value', or remove gradient_clip_val."
        )
    if not by_value:
        raise UnsupportedError(
            f"gradient_clip_val={value} by norm: each rank sees the gradients of its own shards only, so that ranks "
            "would clip by different norms. Use gradient_clip_algorithm='value', or remove gradient_clip_val."
        )


class ClippingGuard:
    """Refuses calls of `self.clip_gradients` that would not be exact; manual optimization reaches no other check."""

    def __init__(self) -> None:
        self._plugin: Precision | None = None

    def put_on(self, plugin: Precision, fused: list[str]) -> None:
        """Check every clipping that goes through the Trainer's precision plugin."""
        original = type(plugin).clip_gradients

        def guarded(optimizer: Any, clip_val: Any = 0.0, gradient_clip_algorithm: Any = None) -> None:
            if clip_val:
                refuse_clip(clip_val, gradient_clip_algorithm, fused)
            original(plugin, optimizer, clip_val, gradient_clip_algorithm or GradClipAlgorithmType.NORM)

        plugin.clip_gradients = guarded  # type: ignore[method-assign]
        self._plugin = plugin

    def take_off(self) -> None:
        """Undo `put_on`."""
        if self._plugin is not None:
            self._plugin.__dict__.pop("clip_gradients", None)
            self._plugin = None
