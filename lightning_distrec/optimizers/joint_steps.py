"""Steps and zeroes optimizers of tables together with the one that the user's configure_optimizers has returned."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_distrec.errors import OptimizerError


def step_with(optimizer: Optimizer, table_optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Let `own` step after each step of `optimizer`; returns an undo.

    With `zero_with`, everything that decides about the user's step decides about theirs: accumulation, the module's
    optimizer_step and optimizer_zero_grad, a loss scaler that skips a step, manual optimization.
    """

    def stepped(*_: Any) -> None:
        for other in table_optimizers:
            other.step()

    return optimizer.register_step_post_hook(stepped).remove


def zero_with(optimizer: Optimizer, table_optimizers: Sequence[Optimizer]) -> Callable[[], None]:
    """Let `own` forget gradients when `optimizer`, or Lightning's wrapper around it, does; returns an undo."""

    def zero_own(set_to_none: bool) -> None:
        for other in table_optimizers:
            other.zero_grad(set_to_none=set_to_none)

    return before_zero_grad(optimizer, zero_own)


def before_zero_grad(optimizer: Optimizer, action: Callable[[bool], None]) -> Callable[[], None]:
    """Let `zero_grad` of the optimizer, or of Lightning's wrapper around it, begin with `action`; returns an undo."""
    zero_grad = optimizer.zero_grad

    def with_action(set_to_none: bool = True) -> None:
        action(set_to_none)
        zero_grad(set_to_none=set_to_none)

    optimizer.zero_grad = with_action  # type: ignore[method-assign]  # on the instance: torch has no hook for it

    def undo() -> None:
        optimizer.__dict__.pop("zero_grad", None)

    return undo


def parameters_of(optimizers: Iterable[Optimizer]) -> list[nn.Parameter]:
    """Return all parameters of the optimizers."""
    return [parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]]


@contextmanager
def with_parameters(optimizer: Optimizer, parameters: list[nn.Parameter]) -> Iterator[None]:
    """Inside of the context the optimizer has one param group more, with `parameters`."""
    if not parameters:
        yield
        return
    optimizer.param_groups.append({"params": parameters})
    try:
        yield
    finally:
        optimizer.param_groups.pop()


class AddedTables:
    """Notices tables with an optimizer of their own that are added to another, as fine-tuning callbacks do."""

    def __init__(self, names: dict[int, str]) -> None:
        """names: id of a shard -> the full name of its table."""
        self._names = names
        self._num_parameters = -1

    def refuse(self, optimizers: list[Optimizer]) -> None:
        """Raise OptimizerError: one of the user's optimizers has such a table now, so that two would update it."""
        count = sum(len(group["params"]) for optimizer in optimizers for group in optimizer.param_groups)
        if count == self._num_parameters:
            return
        self._num_parameters = count
        table = next((self._names[id(p)] for p in parameters_of(optimizers) if id(p) in self._names), None)
        if table is not None:
            raise OptimizerError(
                f"table '{table}' was added to the optimizer of configure_optimizers, and has table_optimizer already. "
                "To unfreeze it, set requires_grad only (BaseFinetuning.make_trainable)."
            )
