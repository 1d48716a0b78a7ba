"""Layers that unfreeze in the middle of a run.

DistributedDataParallel averages the gradients of parameters that require one when it is made, and ignores the others
for good: after unfreezing, each rank would train weights of its own.
"""

from collections.abc import Iterable

from torch import nn


class FrozenLayers:
    """The parameters that did not require a gradient when DistributedDataParallel was made."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._frozen = [parameter for parameter in parameters if not parameter.requires_grad]

    @property
    def any_unfrozen(self) -> bool:
        """Whether one of them requires a gradient now, so that the module must be wrapped in DDP again."""
        return any(parameter.requires_grad for parameter in self._frozen)
