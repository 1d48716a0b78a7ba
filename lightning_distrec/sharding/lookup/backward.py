"""What lookups do in backward: the order in which gradients are exchanged, and the refusal of second gradients.

Lazy outputs are awaited on first access, and their autograd nodes are made then. A rank may access rows earlier than
others, for example to log their norm. Autograd runs the youngest node that is ready, so that ranks would exchange
gradients in different orders: of one lookup with those of another, or with DDP's averages. Hence these nodes get
sequence numbers that depend on the lookup alone, and are above all others: gradients are sent as early as possible.

Gradients of two lookups in a step are refused where two updates inside of backward are not one with their sum.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Protocol

import torch
from torch import Tensor

from lightning_distrec._compat.torch import FIRST_ORDERED, next_backward_number, order_backward
from lightning_distrec.errors import OptimizerError

_NODES_OF_A_LOOKUP = 2**16
_lookups = count()


class BackwardOrder:
    """The place of one lookup. All ranks make their lookups, and so these objects, in one order."""

    def __init__(self) -> None:
        self._next_number = FIRST_ORDERED + _NODES_OF_A_LOOKUP * next(_lookups)

    @contextmanager
    def number(self, outputs: Callable[[], list[Tensor]]) -> Iterator[None]:
        """Number the nodes that are made inside of the context and that lead to `outputs`.

        What is made later comes first in backward.
        """
        # `outputs` is a function since it is called at the end of the context, when they exist.
        since = next_backward_number()
        yield
        self._next_number += order_backward(outputs(), since, self._next_number)


class UpdateWatch(Protocol):
    """Watches lookups of tables that are updated inside of backward; optimizers/backward_watch.py has it."""

    def note_call(self) -> None:
        """The user's code makes a lookup now."""

    def note_lookup(self) -> Callable[[Tensor], None] | None:
        """Rows are looked up. Return a hook for the gradients of the rows, or None."""


class SecondGradients:
    """The gradients of one collection's lookups. tables: full names of those that are updated once for each lookup."""

    def __init__(self, path: str, tables: list[str]) -> None:
        self._path = path
        self._tables = tables
        self._lookups: set[object] = set()

    def refuse(self, tables: Iterable[str]) -> None:
        """Refuse second gradients of these tables too, from now on."""
        self._tables = list(dict.fromkeys([*self._tables, *tables]))

    def hooks(self, update_watch: UpdateWatch | None) -> list[Callable[[Tensor], None]]:
        """Return what to call with each gradient of the lookup that is made now."""
        if not torch.is_grad_enabled():
            return []
        watched = None if update_watch is None else update_watch.note_lookup()
        return [hook for hook in (watched, self._hook()) if hook is not None]

    def _hook(self) -> Callable[[Tensor], None] | None:
        """Return what refuses a second gradient, None: nothing does."""
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
