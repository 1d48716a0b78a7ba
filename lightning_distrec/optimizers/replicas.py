"""Checks from time to time that replicated weights are still equal on all ranks.

Averaged gradients and equal steps keep them equal. What breaks that would go unnoticed: user code that clips by a norm
over its own rank's gradients, shards among them (torch.nn.utils.clip_grad_norm_), or an update that depends on
the rank.
"""

from collections.abc import Callable, Iterable

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_distrec.errors import OptimizerError
from lightning_distrec.ranks import Ranks

TOLERANCE = 1e-5
"""Largest difference of a weight's sum, relative to the sum of absolute values; on identical machines it is 0."""


class ReplicaCheck:
    """Compares replicated weights between ranks after 1, 2, 4, 8 ... steps.

    replicated: returns the names and parameters that are replicated.
    """

    def __init__(self, replicated: Callable[[], Iterable[tuple[str, nn.Parameter]]], ranks: Ranks) -> None:
        self._replicated = replicated
        self._ranks = ranks
        self._steps = 0

    def before_step(self) -> None:
        """Collective at some steps, alike on all ranks. Raise OptimizerError where weights differ between ranks."""
        steps, self._steps = self._steps, self._steps + 1
        if self._ranks.num_ranks == 1 or steps == 0 or steps & (steps - 1):
            return
        local_sums = {name: _sums(parameter) for name, parameter in self._replicated() if not isinstance(parameter, DTensor)}
        for rank, remote_sums in enumerate(self._ranks.all_gather(local_sums)):
            for name, (total, size) in remote_sums.items():
                local_total = local_sums.get(name, (float("nan"), 0.0))[0]
                if abs(total - local_total) > TOLERANCE * size:
                    raise OptimizerError(
                        f"'{name}' is no longer the same on all ranks after {steps} steps: its sum is {local_total:.7g} on "
                        f"rank {self._ranks.rank} and {total:.7g} on rank {rank}. Each rank has its own shards of the "
                        "tables' gradients, so that a norm over them (torch.nn.utils.clip_grad_norm_) differs too: "
                        "clip with gradient_clip_val or self.clip_gradients. Other causes: layers that the loss of a "
                        "step does not use (set find_unused_parameters=True of the strategy), updates that depend on "
                        "the rank, or loss.backward() in place of self.manual_backward."
                    )


def _sums(parameter: nn.Parameter) -> tuple[float, float]:
    values = parameter.detach().double()
    return float(values.sum()), float(values.abs().sum())
