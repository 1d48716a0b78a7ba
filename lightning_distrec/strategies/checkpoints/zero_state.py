"""The state of parameters that are shared out among ranks, as every rank hands it to a checkpoint."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_distrec.chunks import Chunk, ChunkedTensor
from lightning_distrec.cluster.consensus import Consensus

OwnerOf = Callable[[Tensor], int]
"""The rank that keeps the state of a parameter."""


def owned_state(
    parameters: Mapping[str, Tensor], optimizer: Optimizer, owner_of: OwnerOf, consensus: Consensus
) -> dict[str, dict[str, Any]]:
    """Collective. Return state by name: of every tensor the owner has all, the other ranks its shape and type."""
    owned = {name for name, parameter in parameters.items() if owner_of(parameter) == consensus.rank}
    kept = {name: optimizer.state[p] for name, p in parameters.items() if name in owned and p in optimizer.state}
    told = consensus.all_gather({name: {k: _like(v) for k, v in state.items()} for name, state in kept.items()})
    likes = {name: like for of_rank in told for name, like in of_rank.items()}
    return {
        name: {key: _entry(like, kept.get(name, {}).get(key)) for key, like in likes[name].items()}
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
