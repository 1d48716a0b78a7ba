"""The optimizer state of ZeRO-partitioned parameters, as every rank passes it to a checkpoint."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from lightning_distrec.chunks import Chunk, ChunkedTensor
from lightning_distrec.cluster.consensus import Consensus

RankOf = Callable[[Tensor], int]
"""Returns the rank that holds a parameter's optimizer state; of several, the one that saves it."""


class StateRanks(NamedTuple):
    """Which ranks hold the optimizer state of a parameter."""

    rank_of: RankOf
    is_here: Callable[[Tensor], bool] | None = None
    """Whether this rank does; None: only the one of `rank_of`."""

    def hold(self, parameter: Tensor, rank: int) -> bool:
        """Whether a rank, this one, holds a parameter's state."""
        return self.rank_of(parameter) == rank if self.is_here is None else self.is_here(parameter)


def partitioned_state(
    parameters: Mapping[str, Tensor], optimizer: Optimizer, rank_of: RankOf, consensus: Consensus
) -> dict[str, dict[str, Any]]:
    """Collective. Return state by name: the rank that holds it has the values, the others shapes and types."""
    local_states = {
        name: optimizer.state[parameter]
        for name, parameter in parameters.items()
        if rank_of(parameter) == consensus.rank and parameter in optimizer.state
    }
    gathered = consensus.all_gather({
        name: {k: _like(v) for k, v in state.items()} for name, state in local_states.items()
    })
    likes = {name: like for rank_likes in gathered for name, like in rank_likes.items()}
    return {
        name: {key: _entry(like, local_states.get(name, {}).get(key)) for key, like in likes[name].items()}
        for name in parameters
        if name in likes
    }


def _like(value: Any) -> Any:
    """Return a tensor's shape and type; a small value as it is."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype) if value.dim() else value.detach().cpu()
    return [value]


def _entry(like: Any, value: Tensor | None) -> Any:
    if isinstance(like, list):
        return like[0]
    if isinstance(like, Tensor):
        return like
    shape, dtype = like
    return ChunkedTensor(shape, dtype, [] if value is None else [Chunk((0,) * len(shape), value.detach())])
