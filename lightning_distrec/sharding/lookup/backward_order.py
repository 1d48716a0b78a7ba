"""The order in which backward exchanges gradients: that of the lookups, whenever each rank accessed their rows.

Lazy outputs are awaited on first access, and their autograd nodes are made then. A rank may access rows earlier than
others, for example to log their norm. Autograd runs the youngest node that is ready, so that ranks would exchange
gradients in different orders: of one lookup with those of another, or with DDP's averages. Hence these nodes get
sequence numbers that depend on the lookup alone, and are above all others: gradients are sent as early as possible.
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
        self._next_number = FIRST_ORDERED + _NODES_OF_A_LOOKUP * next(_lookups)

    @contextmanager
    def of(self, outputs: Callable[[], list[Tensor]]) -> Iterator[None]:
        """Number the nodes that are made inside of the context and that lead to `outputs`.

        What is made later comes first in backward.
        """
        # `outputs` is a function since it is called at the end of the context, when they exist.
        since = next_backward_number()
        yield
        self._next_number += order_backward(outputs(), since, self._next_number)
