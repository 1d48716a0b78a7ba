"""Layers that every rank has, and whose gradients DistributedDataParallel averages."""

from contextlib import AbstractContextManager, nullcontext

from torch.optim import Optimizer

NOTHING = nullcontext()


class ReplicatedLayers:
    """In the place of a FullyShardedModule: nothing is to be done around layers that DDP averages."""

    def step(self) -> AbstractContextManager[None]:
        """Do nothing around a step."""
        return NOTHING

    def backward(self) -> AbstractContextManager[None]:
        """Do nothing around backward."""
        return NOTHING

    def optimizer_step(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Do nothing around an optimizer's step."""
        return NOTHING

    def no_sync(self) -> AbstractContextManager[None]:
        """Do nothing where gradients accumulate."""
        return NOTHING
