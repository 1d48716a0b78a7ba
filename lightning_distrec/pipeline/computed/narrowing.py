"""What the recording of another step teaches about a slice: which origin of a number it is, and what changes."""

from typing import Any

import torch

from lightning_distrec.pipeline.computed.operations import Number, Operation, flatten
from lightning_distrec.pipeline.computed.slices import Slice

OTHER_OPERATIONS = "the step does not compute it with the operations of its first step"


def narrow(mine: Slice, other: Slice) -> str:
    """Keep of the origins of `mine` those that fit in the step of `other` too.

    Returns why the two do not compute the same, or "".
    """
    if changed := mine.changed():
        return changed
    if mine.text != other.text:
        return OTHER_OPERATIONS
    for name, held in mine.held.items():
        there = other.held[name].tensor
        if there is not held.tensor and not torch.equal(there, held.tensor):
            return f"{name} changes"
    if not all(map(torch.equal, mine.constants, other.constants)):
        return "a tensor that the step makes of Python numbers changes"
    mine.shapes |= other.shapes
    place = dict(zip(other.operations, mine.operations, strict=True))
    for one, another in zip(mine.operations.values(), other.operations.values(), strict=True):
        if not all(_narrow_number(number, found, place) for number, found in _numbers(one, another)):
            return f"a number that {one.function} is given changes from step to step, and is no size of the batch"
    for guard, found in zip(mine.guards, other.guards, strict=True):
        if isinstance(guard.expected, Number) and isinstance(found.expected, Number):
            if not _narrow_number(guard.expected, found.expected, place):
                return "Python has read a number of the batch before the call, and what for is not known"
        elif guard.expected != found.expected:
            return OTHER_OPERATIONS
    return ""


def _numbers(one: Operation, other: Operation) -> list[tuple[Number, Number]]:
    found: Any = zip(flatten((one.args, one.kwargs)), flatten((other.args, other.kwargs)), strict=True)
    return [(mine, theirs) for mine, theirs in found if isinstance(mine, Number)]


def _narrow_number(mine: Number, other: Number, place: dict[int, int]) -> bool:
    theirs = {("read", place.get(origin[1])) if origin[0] == "read" else origin for origin in other.origins}
    mine.origins &= theirs
    return bool(mine.origins)
