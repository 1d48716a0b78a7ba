"""What happens around an optimizer's step: hooks before updates, optimizers that step together,
groups of two kinds."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_distrec.errors import OptimizerError, UnsupportedError

INEXACT_OVER_SHARDS = ("Adafactor", "Muon", "Rprop")
"""Optimizers of torch that were tried over DTensors, and fail or have other numbers."""


def register_update_pre_hook(optimizer: Optimizer, action: Callable[[], None]) -> RemovableHandle:
    """Call `action` in every step before parameters are updated; returns a handle that removes it.

    torch's pre-hooks run before the step's closure, in which Lightning computes the loss, runs
    backward and clips, so that the action is appended to it. A closure that an optimizer calls
    several times runs the action as often.
    """

    def before_step(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # torch's hooks get the arguments of `step`, its self included: the closure is the second
        # one.
        closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            action()
            return None

        # Backward runs in the closure: only at its end are gradients those of the update.
        def closure_and_action() -> Any:
            result = closure()
            action()
            return result

        if len(args) > 1:
            return (args[0], closure_and_action, *args[2:]), kwargs
        return args, kwargs | {"closure": closure_and_action}

    return optimizer.register_step_pre_hook(before_step)


def step_with(optimizer: Optimizer, table_optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Let the tables' optimizers step after each step of `optimizer`; returns an undo.

    With `zero_with`, everything that decides about the user's step decides about theirs:
    accumulation, the module's optimizer_step and optimizer_zero_grad, a loss scaler that skips a
    step, manual optimization.
    """

    def step_tables(*_: Any) -> None:
        for table_optimizer in table_optimizers:
            table_optimizer.step()

    # A post-hook and not a step of our own: where the user's step is skipped, this one is too.
    return optimizer.register_step_post_hook(step_tables).remove


def zero_with(optimizer: Optimizer, table_optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Let the tables' optimizers forget gradients when `optimizer`, or Lightning's wrapper, does;
    returns an undo."""

    def zero_tables(set_to_none: bool) -> None:
        for table_optimizer in table_optimizers:
            table_optimizer.zero_grad(set_to_none=set_to_none)

    return before_zero_grad(optimizer, zero_tables)


def before_zero_grad(optimizer: Optimizer, action: Callable[[bool], None]) -> Callable[[], None]:
    """Let `zero_grad` of the optimizer, or of Lightning's wrapper around it, begin with `action`;
    returns an undo."""
    # The method as it is now: several such wrappers may lie on one optimizer, and undo takes all of
    # them off.
    zero_grad = optimizer.zero_grad

    def with_action(set_to_none: bool = True) -> None:
        action(set_to_none)
        zero_grad(set_to_none=set_to_none)

    # On the instance: torch has no hook for it.
    optimizer.zero_grad = with_action  # type: ignore[method-assign]
    return lambda: optimizer.__dict__.pop("zero_grad", None)


def collect_parameters(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """Return all parameters of the optimizers."""
    parameters: list[nn.Parameter] = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters += group["params"]
    return parameters


def refuse_inexact_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Raise UnsupportedError: an optimizer has other numbers over shards than over full
    parameters."""
    for optimizer in optimizers:
        kind = type(optimizer)
        hint = "Use another optimizer, or strategy='ddp_tuned'."
        if isinstance(optimizer, LBFGS):
            raise UnsupportedError(
                f"torch.optim.LBFGS flattens all parameters into one vector. {hint}"
            )
        if kind.__name__ in INEXACT_OVER_SHARDS and kind.__module__.startswith("torch.optim"):
            raise UnsupportedError(
                f"torch.optim.{kind.__name__} fails, or has other numbers, over sharded parameters "
                f"(torch 2.13). {hint}"
            )


class AddedTables:
    """Notices tables with an optimizer of their own that are added to another, as fine-tuning
    callbacks do."""

    def __init__(self, names: dict[int, str]) -> None:
        """names: id of a shard -> the full name of its table."""
        self._names = names
        self._num_parameters = -1

    def refuse(self, optimizers: list[Optimizer]) -> None:
        """Raise OptimizerError: one of the user's optimizers has such a table now, so that two
        would update it."""
        # Called in every step: a count is cheap, and a table that is added changes it.
        count = sum(
            len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups
        )
        if count == self._num_parameters:
            return
        self._num_parameters = count
        for parameter in collect_parameters(optimizers):
            if id(parameter) in self._names:
                raise OptimizerError(
                    f"table '{self._names[id(parameter)]}' was added to the optimizer of "
                    "configure_optimizers, and has table_optimizer already. To unfreeze it, set "
                    "requires_grad only (BaseFinetuning.make_trainable)."
                )


@contextmanager
def uniform_groups(optimizer: Optimizer) -> Iterator[None]:
    """Inside of the context let a step see each param group split into DTensors and plain tensors.

    torch's foreach updates refuse several kinds at once. The step's closure, hooks, schedulers and
    checkpoints see the groups as they were made. Raises UnsupportedError: the step computes
    something over a group, which would differ when split.
    """
    unsplit_groups: list[dict[str, Any]] | None = None  # while the optimizer has the split ones
    parts: list[list[dict[str, Any]]] = []

    def split() -> None:
        nonlocal unsplit_groups, parts
        # New dicts around the same parameters: state is by parameter, and is not split.
        parts = list(map(_split_by_kind, optimizer.param_groups))
        # A new list: the one with the groups as they were made goes back to the optimizer in
        # `restore`.
        groups = list(chain.from_iterable(parts))
        if len(groups) > len(parts):
            unsplit_groups = optimizer.param_groups
            optimizer.param_groups = groups

    def restore() -> None:
        nonlocal unsplit_groups
        if unsplit_groups is not None:
            optimizer.param_groups = unsplit_groups
            unsplit_groups = None

    def join(*_: Any) -> None:
        if unsplit_groups is not None:
            restore()
            _copy_changes(optimizer, parts)

    handles = register_update_pre_hook(optimizer, split), optimizer.register_step_post_hook(join)
    try:
        yield
    finally:
        # Also after a step that has failed: the groups are as they were made whatever happens.
        for handle in handles:
            handle.remove()
        restore()


def _copy_changes(optimizer: Optimizer, parts: list[list[dict[str, Any]]]) -> None:
    """Copy what a step has changed in split groups to the groups that they were made of."""
    for group, (first, *further) in zip(optimizer.param_groups, parts, strict=True):
        # A step may write to its groups, an adapted rate for example: all parts must have written
        # the same.
        for key in first.keys() - {"params"}:
            if any(part[key] is not first[key] and part[key] != first[key] for part in further):
                raise UnsupportedError(
                    f"{type(optimizer).__name__} computes '{key}' over all parameters of a group, "
                    "of which some are sharded and some are not, so that they cannot be stepped at "
                    "once. Give those that are not sharded an optimizer, or a param group, of "
                    "their own."
                )
            group[key] = first[key]


def _split_by_kind(group: dict[str, Any]) -> list[dict[str, Any]]:
    kinds: tuple[list[Any], list[Any]] = ([], [])
    for parameter in group["params"]:
        kinds[isinstance(parameter, DTensor)].append(parameter)
    return [{**group, "params": parameters} for parameters in kinds] if all(kinds) else [group]
