"""The order in which backward exchanges gradients: that of the lookups, whenever each rank touched their rows.

Rows are waited for when user code first touches them, and autograd's nodes are made then. A rank may touch rows earlier
than others, to log their norm, say. Autograd runs the youngest node that is ready, so that the ranks would exchange
gradients in different orders: of one lookup with those of another, or with DDP's averages. Hence these nodes get
numbers that depend on the lookup alone, above all others, so that gradients leave as early as they can.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from torch import Tensor

from lightning_distrec._compat.torch import FIRST_ORDERED, next_backward_number, order_backward

_NODES_OF_A_LOOKUP = 2**16
_lookups = count()


class BackwardOrder:
    """The place of one lookup. All ranks make their lookups, and so these objects, in one order."""

    def __init__(self) -> None:
        self._next = FIRST_ORDERED + _NODES_OF_A_LOOKUP * next(_lookups)

    @contextmanager
    def of(self, outputs: Callable[[], list[Tensor]]) -> Iterator[None]:
        """Give the nodes that are made inside of the context, and that lead to `outputs`, their place.

        What is made later comes first in backward.
        """
        since = next_backward_number()
        yield
        self._next += order_backward(outputs(), since, self._next)
