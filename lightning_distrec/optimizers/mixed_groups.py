"""Steps over param groups in which some parameters are sharded DTensors and others are plain tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_distrec.errors import UnsupportedError


@contextmanager
def uniform_groups(optimizer: Optimizer) -> Iterator[None]:
    """Let a step inside of the context see param groups with parameters of one kind: torch's batched updates refuse
    both at once. The step's closure, hooks, schedulers and checkpoints see the groups as they were made.

    Raises UnsupportedError: the step computes something over a whole group, which would differ between its parts.
    """
    groups: list[Any] = []
    parts: list[list[dict[str, Any]]] = []

    def split() -> None:
        parts[:] = [_parts(group) for group in optimizer.param_groups]
        if any(len(of_group) > 1 for of_group in parts):
            groups[:] = [optimizer.param_groups]
            optimizer.param_groups = [part for of_group in parts for part in of_group]

    def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure: Callable[[], Any] | None = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            split()
            return None

        def then_split() -> Any:
            result = closure()
            split()
            return result

        return ((args[0], then_split, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": then_split})

    def after(*_: Any) -> None:
        if groups:
            optimizer.param_groups = groups.pop()
            _take_over(optimizer, parts)

    handles = optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if groups:
            optimizer.param_groups = groups.pop()


def _take_over(optimizer: Optimizer, parts: list[list[dict[str, Any]]]) -> None:
    """Let groups have what a step has changed in their parts."""
    for group, of_group in zip(optimizer.param_groups, parts, strict=True):
        for key in [key for key in of_group[0] if key != "params"]:
            if any(part[key] is not of_group[0][key] and part[key] != of_group[0][key] for part in of_group):
                raise UnsupportedError(
                    f"{type(optimizer).__name__} computes '{key}' over all parameters of a group, of which some are "
                    "sharded and some are not, and cannot be stepped together. Give those that are not sharded an "
                    "optimizer, or a param group, of their own."
                )
            group[key] = of_group[0][key]


def _parts(group: dict[str, Any]) -> list[dict[str, Any]]:
    kinds: tuple[list[Any], list[Any]] = ([], [])
    for parameter in group["params"]:
        kinds[isinstance(parameter, DTensor)].append(parameter)
    if not all(kinds):
        return [group]
    return [{**group, "params": parameters} for parameters in kinds]
