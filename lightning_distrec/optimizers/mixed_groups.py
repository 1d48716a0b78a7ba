"""Steps optimizers whose param groups mix sharded DTensors and plain tensors, which torch refuses to step at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_distrec.errors import UnsupportedError
from lightning_distrec.optimizers.step_hooks import register_update_pre_hook


@contextmanager
def uniform_groups(optimizer: Optimizer) -> Iterator[None]:
    """Inside of the context let a step see each param group split into DTensors and plain tensors.

    torch's foreach updates refuse several kinds at once. The step's closure, hooks, schedulers and checkpoints see the
    groups as they were made. Raises UnsupportedError: the step computes something over a group, which would differ when
    split.
    """
    groups: list[Any] = []
    split_groups: list[list[dict[str, Any]]] = []

    def split() -> None:
        split_groups[:] = [_by_kind(group) for group in optimizer.param_groups]
        if any(len(parts) > 1 for parts in split_groups):
            groups[:] = [optimizer.param_groups]
            optimizer.param_groups = [one_kind for parts in split_groups for one_kind in parts]

    def after(*_: Any) -> None:
        if groups:
            optimizer.param_groups = groups.pop()
            _copy_changes(optimizer, split_groups)

    handles = register_update_pre_hook(optimizer, split), optimizer.register_step_post_hook(after)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if groups:
            optimizer.param_groups = groups.pop()


def _copy_changes(optimizer: Optimizer, split_groups: list[list[dict[str, Any]]]) -> None:
    """Copy what a step has changed in split groups to the groups that they were made of."""
    for group, parts in zip(optimizer.param_groups, split_groups, strict=True):
        for key in [key for key in parts[0] if key != "params"]:
            if any(other[key] is not parts[0][key] and other[key] != parts[0][key] for other in parts):
                raise UnsupportedError(
                    f"{type(optimizer).__name__} computes '{key}' over all parameters of a group, of which some are "
                    "sharded and some are not, so that they cannot be stepped at once. Give those that are not sharded "
                    "an optimizer, or a param group, of their own."
                )
            group[key] = parts[0][key]


def _by_kind(group: dict[str, Any]) -> list[dict[str, Any]]:
    kinds: tuple[list[Any], list[Any]] = ([], [])
    for parameter in group["params"]:
        kinds[isinstance(parameter, DTensor)].append(parameter)
    if not all(kinds):
        return [group]
    return [{**group, "params": parameters} for parameters in kinds]
