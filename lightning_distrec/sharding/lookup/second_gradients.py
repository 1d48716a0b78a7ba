"""Refuses gradients of two lookups in a step where two updates inside of backward are not one with their sum."""

from collections.abc import Callable, Iterable

from torch import Tensor

from lightning_distrec.errors import OptimizerError


class SecondGradients:
    """The gradients of one collection's lookups. tables: full names of those that are updated once for each lookup."""

    def __init__(self, path: str, tables: list[str]) -> None:
        self._path = path
        self._tables = tables
        self._lookups: set[object] = set()

    def refuse_of(self, tables: Iterable[str]) -> None:
        """Refuse second gradients of these tables too, from now on."""
        self._tables = list(dict.fromkeys([*self._tables, *tables]))

    def hook(self) -> Callable[[Tensor], None] | None:
        """Return what to call with each gradient of the lookup that is made now, None: nothing."""
        if not self._tables:
            return None
        lookup = object()

        def gradient_arrived(_: Tensor) -> None:
            self._lookups.add(lookup)
            if len(self._lookups) > 1:
                raise OptimizerError(
                    f"gradients came to more than one lookup of '{self._path}' in a step, and table "
                    f"'{self._tables[0]}' is updated inside of backward, once for each lookup, which is not one "
                    "update with their sum. Set embedding_update='sparse' ('dense' for RowWiseAdagrad), or look all "
                    "ids up at once."
                )

        return gradient_arrived

    def forget(self) -> None:
        """Begin again: an optimizer has used the gradients that have come so far."""
        self._lookups.clear()
