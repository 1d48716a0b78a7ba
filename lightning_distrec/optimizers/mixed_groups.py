"""Steps over param groups in which some parameters are sharded DTensors and others are plain tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_distrec.errors import UnsupportedError


@contextmanager
def unmixed_groups(optimizer: Optimizer) -> Iterator[None]:
    """While it lasts, each param group has parameters of one kind: torch's batched updates refuse both at once.

    Schedulers and checkpoints see the groups as they were made.
    Raises UnsupportedError: the step computes something over a whole group, which would differ between its parts.
    """
    groups = optimizer.param_groups
    parts = [_parts(group) for group in groups]
    if all(len(of_group) == 1 for of_group in parts):
        yield
        return
    optimizer.param_groups = [part for of_group in parts for part in of_group]
    try:
        yield
    finally:
        optimizer.param_groups = groups
    for group, of_group in zip(groups, parts, strict=True):
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
