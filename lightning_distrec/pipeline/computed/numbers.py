"""Where an integer of a step may come from, and what it is for another batch. Numbers are never guessed."""

from typing import Any

from lightning_distrec.pipeline.computed.operations import NotReadyError, Origin
from lightning_distrec.pipeline.provenance.batch_objects import BatchObjects
from lightning_distrec.pipeline.provenance.sources import object_at

LARGEST = 2**62
"""torch writes x[:, 2:] with an end of 2**63 - 1."""


class NumberOrigins:
    """The numbers of one batch: value -> where it may come from."""

    def __init__(self, objects: BatchObjects) -> None:
        self._origins: dict[int, set[Origin]] = {}
        for tensor, path in objects.tensors_with_paths:
            for dim, size in enumerate(tensor.shape):
                for plus in (-1, 0, 1):
                    self.add(size + plus, ("size", path, dim, plus))
            if tensor.dim() != 1:
                self.add(tensor.numel(), ("numel", path))
        for number, path in objects.integers:
            self.add(number, ("item", path))

    def add(self, value: int, origin: Origin) -> None:
        """Note that a number of this value may come from there."""
        self._origins.setdefault(value, set()).add(origin)

    def of(self, value: Any) -> frozenset[Origin]:
        """Return all origins that fit; a constant always does."""
        found = self._origins.get(value, set()) if type(value) is int else set()
        return frozenset(found | {("const", value)})


class BatchNumbers:
    """What numbers are for one batch.

    roots: of the batch. made: operation -> its outputs, those of reads too.
    """

    def __init__(self, roots: Any) -> None:
        self._roots = roots
        self._values: dict[Origin, Any] = {}

    def value(self, origins: frozenset[Origin], made: dict[int, Any]) -> Any:
        """Return the number on which all origins agree. Raises NotReadyError: they do not."""
        values = {self._value(origin, made) for origin in origins}
        if len(values) != 1:
            raise NotReadyError(f"a number may be any of {sorted(values)}")
        return values.pop()

    def _value(self, origin: Origin, made: dict[int, Any]) -> Any:
        if origin[0] == "const":
            return origin[1]
        if origin[0] == "read":
            return made[origin[1]][0]
        if origin not in self._values:
            self._values[origin] = self._of_batch(origin)
        return self._values[origin]

    def _of_batch(self, origin: Origin) -> Any:
        found = object_at(self._roots, origin[1])
        if origin[0] == "item":
            return found
        return found.numel() if origin[0] == "numel" else found.shape[origin[2]] + origin[3]
