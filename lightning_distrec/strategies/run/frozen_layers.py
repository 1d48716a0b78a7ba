"""Layers that begin to learn in the middle of a run, whose gradients DistributedDataParallel would never average.

It takes the parameters that learn when it is made, and passes the others over for good: each rank would go on with
weights of its own.
"""

from collections.abc import Iterable

from torch import nn


class FrozenLayers:
    """The parameters that did not learn when gradients' exchange was set up. parameters: those it is about."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]

    @property
    def have_thawed(self) -> bool:
        """Whether one of them learns now, so that the exchange must be set up anew."""
        return any(parameter.requires_grad for parameter in self._frozen)
