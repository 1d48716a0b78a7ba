"""Updates of tables inside of backward: where they are allowed, and a watch that they are those of
`step`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_distrec._compat.torch import current_backward
from lightning_distrec.errors import OptimizerError, UnsupportedError
from lightning_distrec.optimizers.param_groups import TableParamGroup

GRADIENT_HOOKS = (
    "backward",
    "on_after_backward",
    "configure_gradient_clipping",
    "on_before_optimizer_step",
    "optimizer_step",
    "optimizer_zero_grad",
)
"""Hooks of a LightningModule that may look at gradients, change them, or step at other times than
Lightning."""


def obstacle_to_backward_updates(
    trainer: Trainer, module: LightningModule, precision: Precision
) -> str:
    """Return why the tables' updates must wait for `optimizer.step()`, or "" where they may run
    inside of backward."""
    if not module.automatic_optimization:
        # Whether every step follows a backward of its own shows when it is too late; ManualWatch
        # checks it on request.
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


def refuse_inexact_settings(trainer: Trainer, precision: Precision, fused: list[str]) -> None:
    """Raise UnsupportedError where a setting of the Trainer would give other numbers than an
    unsharded run.

    fused: full names of the tables that are updated inside of backward.
    """
    if not fused:
        return
    subject = f"table '{fused[0]}' is updated inside of backward"
    max_accumulated = _max_accumulated(trainer)
    if max_accumulated > 1:
        raise UnsupportedError(
            f"accumulate_grad_batches={max_accumulated}: {subject}, at every batch, because "
            "embedding_update asks for it. Set embedding_update='auto', or "
            "accumulate_grad_batches=1."
        )
    refuse_clip(trainer.gradient_clip_val, fused)
    if getattr(precision, "scaler", None) is not None:
        raise UnsupportedError(
            f"precision={trainer.precision!r} scales the loss and may skip steps, but {subject}, "
            "because embedding_update asks for it. Set embedding_update='auto', or use "
            "'bf16-mixed'."
        )


def refuse_inexact_in_backward(
    trainer: Trainer, precision: Precision, tables: list[str], averaged: list[str]
) -> None:
    """Raise UnsupportedError where tables' in-backward optimizers would step with other gradients
    than in one process.

    tables: full names of those that have one. averaged: of these, those whose gradients are
    averaged over ranks.
    """
    if tables and getattr(precision, "scaler", None) is not None:
        raise UnsupportedError(
            f"precision={trainer.precision!r} scales the loss, and the optimizer of table "
            f"'{tables[0]}' steps in backward (apply_optimizer_in_backward), with scaled "
            "gradients. Use 'bf16-mixed', or give the table to configure_optimizers."
        )
    max_accumulated = _max_accumulated(trainer)
    if averaged and max_accumulated > 1:
        raise UnsupportedError(
            f"accumulate_grad_batches={max_accumulated}: the optimizer of table '{averaged[0]}' "
            "steps in every backward (apply_optimizer_in_backward), and its gradient is averaged "
            "over ranks once for all of them. Leave its sharding type to the plan, without "
            "sharding_groups, or set accumulate_grad_batches=1."
        )


def gradient_hooks(trainer: Trainer, module: LightningModule) -> list[str]:
    """Return the hooks around gradients and steps that the module or a callback of the user
    overrides."""
    hooks = [hook for hook in GRADIENT_HOOKS if is_overridden(hook, module)]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        # Lightning's own callbacks change no gradients, but its LambdaCallback runs the user's
        # code.
        if isinstance(callback, LambdaCallback) or not type(callback).__module__.startswith(
            "lightning."
        ):
            name = type(callback).__name__
            for hook in ("on_after_backward", "on_before_optimizer_step"):
                if is_overridden(hook, callback, parent=Callback):
                    hooks.append(f"{name}.{hook}")
    return hooks


def hooks_without_gradients(
    trainer: Trainer, module: LightningModule, fused: list[str]
) -> str | None:
    """Return a warning for users whose hooks would miss the gradients of tables that are fused on
    request, or None."""
    hooks = gradient_hooks(trainer, module)
    if not hooks or not fused:
        return None
    return (
        f"{' and '.join(hooks)} may look at gradients, but table '{fused[0]}' has none: it is "
        "updated inside of backward, because embedding_update asks for it. Where the hook must "
        "reach it, set embedding_update='auto'."
    )


def refuse_clip(value: Any, fused: list[str]) -> None:
    """Raise UnsupportedError where a table would be updated before its gradient is clipped."""
    if value and fused:
        raise UnsupportedError(
            f"gradient_clip_val={value}: table '{fused[0]}' is updated inside of backward, before "
            "gradients are clipped, because embedding_update asks for it. Set "
            "embedding_update='auto', or remove gradient_clip_val."
        )


def _max_accumulated(trainer: Trainer) -> int:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    numbers = [trainer.accumulate_grad_batches]
    for callback in callbacks:
        if isinstance(callback, GradientAccumulationScheduler):
            numbers += callback.scheduling.values()
    return max(numbers)


class BackwardWatch:
    """Counts backward passes and steps of a run with fused tables.

    A fused table is updated by every backward. That is what the user's optimizer does as long as
    each backward is Lightning's and followed by one `step`; accumulation that begins while
    training, an `optimizer_step` that skips steps, and a backward that user code calls, in an
    evaluation or after the run as well, break it.
    """

    def __init__(self, fused_tables: list[str]) -> None:
        self._tables = fused_tables
        self._pending = self._is_running = False

    def backward(self) -> None:
        """A backward is about to begin. Raises OptimizerError: the one before it was not followed
        by a step."""
        if self._pending and self._tables:
            raise OptimizerError(
                f"a second backward before optimizer.step(), but table '{self._tables[0]}' is "
                "updated inside of every backward (accumulate_grad_batches was changed, or "
                "optimizer_step skips steps). Set embedding_update='sparse', or 'dense' for "
                "RowWiseAdagrad."
            )
        self._pending = self._is_running = True

    def end_backward(self) -> None:
        """The backward is over."""
        self._is_running = False

    def note_call(self) -> None:
        """The user's code makes a lookup now."""

    def note_lookup(self) -> Callable[[Any], None]:
        """Rows are looked up. Return a hook for their gradients."""
        return self._gradient_arrived

    def _gradient_arrived(self, _: Any) -> None:
        if not self._is_running and self._tables:
            raise OptimizerError(
                f"a backward that user code has called reaches table '{self._tables[0]}', which is "
                "updated inside of every backward, so that its rows would move without a step: in "
                "training_step, in an evaluation or after the run. Return the loss from "
                "training_step; elsewhere train with embedding_update='sparse' ('dense' for "
                "RowWiseAdagrad), which leaves gradients and moves nothing."
            )

    def step(self) -> None:
        """An optimizer has stepped."""
        self._pending = False


@dataclass
class _Steps:
    """What has happened to one optimizer's tables since it stepped."""

    name: str
    """Of the optimizer's class."""
    table: str
    """Full name of the first one."""
    backward: int | None = None
    """The backward that has updated them, which no step has followed yet."""
    holds_gradients: bool = False
    """Whether it has stepped and its gradients, in an unsharded run, are still there."""
    rates: dict[str, tuple[TableParamGroup, float]] = field(default_factory=dict)
    """Label of a param group -> the rate of its updates."""


class ManualWatch:
    """The same under manual optimization, where each optimizer has its own backward passes and
    steps.

    A fused table is updated by every backward that reaches it. That is what its optimizer does
    where each such backward is followed by one step, with zero_grad between a step and the next
    backward, and nothing in between that reads the table, drops its gradient or changes its rate.
    All methods raise OptimizerError where it is not so.
    """

    def __init__(self, param_groups: Mapping[str, TableParamGroup]) -> None:
        """param_groups: full name of a fused table -> its param group."""
        self._param_groups = param_groups
        self._steps: dict[int, _Steps] = {}
        for table, group in param_groups.items():
            steps = _Steps(type(group.optimizer).__name__, table)
            self._steps.setdefault(group.optimizer_index, steps)

    def note_call(self, tables: list[str]) -> None:
        """The user's code looks up in a collection with these fused tables."""
        for table in tables:
            steps = self._steps[self._param_groups[table].optimizer_index]
            # The rows of this lookup have one update already, which the user's optimizer has not
            # made yet.
            if steps.backward is not None:
                _refuse(
                    table, f"it is looked up after a backward and before the step of {steps.name}"
                )

    def note_lookup(
        self, tables: list[str], learns: Callable[[str], bool]
    ) -> Callable[[Any], None] | None:
        """Rows of these tables are looked up. Return a hook for gradients of the rows; None where
        no table learns."""
        groups = {table: self._param_groups[table] for table in tables if learns(table)}
        if not groups:
            return None
        # The rate at the lookup, as FBGEMM takes it in forward for the update in backward.
        rates = {table: float(group.group["lr"]) for table, group in groups.items()}
        return lambda _: self._gradient_arrived(groups, rates)

    def _gradient_arrived(
        self, groups: Mapping[str, TableParamGroup], rates: Mapping[str, float]
    ) -> None:
        # A backward reaches a table once for each of its lookups: only one of another number is a
        # second backward.
        backward = current_backward()
        for table, group in groups.items():
            steps = self._steps[group.optimizer_index]
            if steps.backward not in (None, backward):
                _refuse(table, f"a second backward reaches it before the step of {steps.name}")
            if steps.holds_gradients:
                _refuse(
                    table,
                    f"{steps.name}.zero_grad() was not called between its last step and this "
                    "backward",
                )
            if steps.rates.setdefault(group.label, (group, rates[table]))[1] != rates[table]:
                _refuse(table, "its learning rate was changed between two lookups")
        # After all tables are checked: those of one optimizer are reached by one backward.
        for group in groups.values():
            self._steps[group.optimizer_index].backward = backward

    def step(self, number: int) -> None:
        """The optimizer with this number has stepped."""
        steps = self._steps.get(number)
        if steps is None:
            return
        # An unsharded step without a new backward would use the last gradients again; a fused table
        # has none left.
        if steps.backward is None and steps.holds_gradients:
            _refuse(steps.table, f"{steps.name} steps again with the same gradients")
        if any(rate != float(group.group["lr"]) for group, rate in steps.rates.values()):
            _refuse(
                steps.table,
                f"its learning rate was changed before the step of {steps.name}",
            )
        # An unsharded run keeps its gradients until zero_grad: a backward before that would add to
        # them.
        steps.holds_gradients = steps.backward is not None
        steps.backward = None
        steps.rates.clear()

    def zero_grad(self, number: int, *_: bool) -> None:
        """The optimizer with this number is about to drop its gradients."""
        steps = self._steps.get(number)
        if steps is None:
            return
        if steps.backward is not None:
            _refuse(
                steps.table,
                f"{steps.name}.zero_grad() drops its gradient before the step",
            )
        steps.holds_gradients = False

    def end_training_step(self) -> None:
        """A training_step, or the fit, is over."""
        for steps in self._steps.values():
            if steps.backward is not None:
                _refuse(
                    steps.table,
                    f"training_step was left without the step of {steps.name}",
                )


@dataclass(frozen=True)
class CollectionWatch:
    """The watch as the lookups of one collection see it."""

    watch: ManualWatch
    tables: list[str]
    """Full names of its fused tables."""
    learns: Callable[[str], bool]

    def note_call(self) -> None:
        """The user's code makes a lookup now."""
        self.watch.note_call(self.tables)

    def note_lookup(self) -> Callable[[Any], None] | None:
        """Rows are looked up. Return a hook for the gradients of the rows, or None."""
        return self.watch.note_lookup(self.tables, self.learns)


def _refuse(table: str, violation: str) -> None:
    raise OptimizerError(
        f"table '{table}' is updated inside of backward, because embedding_update asks for it, and "
        f"{violation}. Under manual optimization one step of its optimizer must follow each "
        "backward that reaches the table, and optimizer.zero_grad() each step. Set "
        "embedding_update='auto' or 'dense' for it."
    )
