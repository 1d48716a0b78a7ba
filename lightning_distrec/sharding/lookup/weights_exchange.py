"""Weights of ids that follow their ids: those that learn, and those that are computed after the ids
were prefetched.

torchrec sends weights with their ids, and no gradient back. Here the input dist permutes, repeats
and divides the places of the weights, in place of the weights. At the call these follow their ids,
by an exchange of their own, and their gradients come back by the same places, with all sharding
types.
"""

from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding_types import KJTList
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec._compat.gloo import tables_dist
from lightning_distrec._compat.torchrec_ids import WeightRoute
from lightning_distrec._compat.torchrec_modules import lookups_of
from lightning_distrec.errors import ShardingError
from lightning_distrec.sharding.lookup.jagged import with_weights
from lightning_distrec.sharding.lookup.lazy_outputs import SecondGradients
from lightning_distrec.sharding.lookup.lookup_setup import LookupSetup, TableUse
from lightning_distrec.sharding.lookup.request import LookupRequest
from lightning_distrec.sharding.weights.shard_access import without_guards

# For all runs: torchrec's modules may outlive one.
_hooked: WeakSet[nn.Module] = WeakSet()


def with_places(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return `features` with the place of each weight, an int32, as the bits of a float32, which is
    what is copied."""
    weights = features.weights()
    places = torch.arange(weights.numel(), dtype=torch.int32, device=weights.device)
    # torchrec permutes, repeats and sends weights of float32, and computes nothing from them: any
    # bits survive.
    return with_weights(features, places.view(torch.float32))


class WeightsExchange:
    """The exchanges of the weights of one collection's calls. second_gradients: refuses those of a
    second lookup."""

    def __init__(self, setup: LookupSetup, second_gradients: SecondGradients) -> None:
        self._sharded = setup.sharded
        self._setup = setup
        self._second_gradients = second_gradients
        self._group = None if setup.groups is None else setup.groups.sharding
        # torchrec divides the gradients of weights as those of rows, and multiplies them again if
        # it knows of weights.
        self._scale = 1 if setup.is_weighted else dist.get_world_size(self._group)
        self._reaches_weights = False

    def _uses(self) -> list[tuple[str, TableUse]]:
        """Return full names of the tables, and how they are sharded and updated now."""
        return [(table.full_name, self._setup.uses[table.name]) for table in self._setup.tables]

    @without_guards
    def _refuse_frozen(self) -> None:
        """Raise ShardingError where a table is frozen now, and its kernel cannot leave it alone in
        a backward."""
        for name, use in self._uses():
            if not use.weight.requires_grad and (use.in_backward or use.is_replicated):
                update = (
                    "is data_parallel" if use.is_replicated else ("is updated inside of backward")
                )
                raise ShardingError(
                    f"table '{name}' is frozen, and was called with ids whose weights need a "
                    f"gradient. A table that {update} cannot pass it on and rest. Freeze it before "
                    "the fit begins, set embedding_update='sparse' or 'dense' and no data_parallel "
                    "for it, or detach the weights."
                )

    def bring(self, request: LookupRequest, weights: Tensor) -> KJTList:
        """Collective. Return the ids that have arrived with the weights of all ranks' calls. Raises
        ShardingError."""
        if request.learns:
            self._refuse_frozen()
            # Gradients of weights that learn would see an update by another lookup.
            self._second_gradients.refuse(name for name, use in self._uses() if use.in_backward)
        if not self._reaches_weights:
            self._reaches_weights = True
            for lookup in lookups_of(self._sharded):
                if lookup not in _hooked:  # by an earlier run
                    _hooked.add(lookup)
                    lookup.register_forward_hook(_reach_weights)
        # what stands for weights has a class of its own
        weights = weights.as_subclass(Tensor).float()
        pairs = zip(request.ids, request.weight_routes, strict=True)
        return KJTList([self._bring(ids, route, weights) for ids, route in pairs])

    def _bring(
        self, ids: KeyedJaggedTensor, route: WeightRoute | None, weights: Tensor
    ) -> KeyedJaggedTensor:
        """route: None where ids stay on their rank."""
        if route is not None:
            sent = weights.index_select(0, _places(route.sent_places))
            weights = _Exchanged.apply(sent, route.sent, route.received, self._scale, self._group)
        return with_weights(ids, weights.index_select(0, _places(ids.weights())))


def _places(bits: Tensor) -> Tensor:
    return bits.view(torch.int32)


class _Exchanged(torch.autograd.Function):
    """Collective. Sends chunks to the ranks, and their gradients back, in the same order of
    exchanges on all ranks."""

    @staticmethod
    def forward(
        ctx: Any, weights: Tensor, sent: list[int], received: list[int], scale: int, group: Any
    ) -> Tensor:
        ctx.exchange = sent, received, scale, group
        return _exchange(weights, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        sent, received, scale, group = ctx.exchange
        # The way back: what was received is sent.
        returned = _exchange(gradient, received, sent, group)
        return returned if scale == 1 else returned * scale, None, None, None, None


def _exchange(numbers: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    arrived = numbers.new_empty(sum(received))
    tables_dist.all_to_all_single(arrived, numbers.contiguous(), received, sent, group)
    return arrived


def _reach_weights(_: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor | None:
    """Let backward reach the weights where no id has arrived, as on a rank without rows: the others
    wait for it."""
    weights = arguments[0].weights_or_none()
    if weights is None or not weights.requires_grad or weights.numel():
        return None
    return output + weights.sum()
