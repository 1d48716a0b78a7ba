"""Reductions over all elements of a table whose shards are on several ranks: sums, norms, extremes, any and all.

Values and gradients have two forms. A full value is on every rank, and its gradient there is of this rank's loss only:
DDP averages those. A shard's gradient is final, the mean over the ranks' losses. Functions between the forms change
gradients with the values: from shards to a full value by a mean over ranks, back by as many times what one rank has.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_distrec.sharding.weights.shard_access import ShardPlace, SharedState, without_guard

NORMS = frozenset({"norm", "vector_norm", "linalg_vector_norm", "linalg_norm", "frobenius_norm"})
WITHOUT_ZEROS = NORMS | {"sum", "mean", "any", "count_nonzero"}
"""What needs no elements that are 0, so that the values of a sparse gradient are enough."""
INPUTS, ORDERS = ("input", "self", "x"), ("p", "ord")


def is_reduction(place: ShardPlace, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this reduces all elements to one number, and every rank computes it now."""
    options = {key for key, value in kwargs.items() if value not in (None, False)} - {*INPUTS, *ORDERS, "dtype"}
    # Norms have their order in this place, the others dims or another tensor.
    has_dims = len(args) > 2 or len(args) == 2 and name not in NORMS
    return name in REDUCTIONS and place.table.has_single_shards and not options and not has_dims


def reduce_over_ranks(name: str, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Collective. Return a number of all elements of a table, (), the same on every rank."""
    values = args[0] if args else next(kwargs[key] for key in INPUTS if key in kwargs)
    order = next((kwargs[key] for key in ORDERS if kwargs.get(key) is not None), args[1] if args[1:] else None)
    place: ShardPlace = values.place
    with without_guard():
        if values.is_sparse:
            values = values.coalesce().values() if name in WITHOUT_ZEROS else values.to_dense()
        values = values.as_subclass(Tensor)
        if kwargs.get("dtype") is not None:
            values = values.to(kwargs["dtype"])
        if name in NORMS:
            power = 2.0 if order in (None, "fro") else float(order)
            if power > 0:
                return _norm(values, power, place)
            raise place.refusal(f"the norm of order {order}")
        return REDUCTIONS[name](values, place)


def _sum(values: Tensor, place: ShardPlace) -> Tensor:
    kind = values.dtype if values.is_floating_point() else torch.int64
    # In float64, so that the result hardly depends on how the table is sharded.
    total = values.sum(dtype=torch.float64 if values.is_floating_point() else kind)
    summed: Tensor = _SumOverRanks.apply(total, place.table.state, f"the sum of {place.table.name}")
    return summed.to(kind)


def _mean(values: Tensor, place: ShardPlace) -> Tensor:
    return _sum(values, place) / (place.table.shape[0] * place.table.shape[1])


def _norm(values: Tensor, power: float, place: ShardPlace) -> Tensor:
    if power == float("inf"):
        return _max(values.abs(), place)
    total = _sum(values.square() if power == 2.0 else values.abs().pow(power), place)
    # The gradient of a norm that is 0 is 0, as torch has it.
    return torch.where(total > 0, total, torch.where(total.isnan(), total, 1.0)).pow(1.0 / power) * (total != 0)


def _var(values: Tensor, place: ShardPlace) -> Tensor:
    num_elements = place.table.shape[0] * place.table.shape[1]
    mean = to_shard(_mean(values, place), place)
    return _sum((values - mean).square(), place) / (num_elements - 1)


def _max(values: Tensor, place: ShardPlace) -> Tensor:
    largest: Tensor = _MaxOverRanks.apply(values, place.table.state, f"the maximum of {place.table.name}")
    return largest


def _min(values: Tensor, place: ShardPlace) -> Tensor:
    return -_max(-values, place)


def _any(values: Tensor, place: ShardPlace) -> Tensor:
    return _sum(values.bool(), place) > 0


REDUCTIONS: dict[str, Callable[[Tensor, ShardPlace], Tensor]] = {
    **{name: _sum for name in (*NORMS, "sum")},
    "mean": _mean,
    "var": _var,
    "std": lambda values, place: _var(values, place).sqrt(),
    "max": _max,
    "amax": _max,
    "min": _min,
    "amin": _min,
    "any": _any,
    "all": lambda values, place: ~_any(~values.bool(), place),
    "count_nonzero": lambda values, place: _sum(values.bool(), place),
}
"""Name of a function of torch or of Tensor -> what it returns for the shard at a place."""


class _SumOverRanks(torch.autograd.Function):
    """Returns the sum of all ranks' values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, state: SharedState, description: str) -> Tensor:
        ctx.state = state
        return state.all_reduce(values.clone(), "sum", description)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return mean_gradient(gradient, ctx.state), None, None


class _MaxOverRanks(torch.autograd.Function):
    """Returns the largest element of all shards, (), or NaN where there is one. Equal ones share its gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, state: SharedState, description: str) -> Tensor:
        ctx.state = state
        numbers = values.double() if values.is_floating_point() else values.long()
        lowest = float("-inf") if values.is_floating_point() else torch.iinfo(torch.int64).min
        # gloo's maximum of a number and NaN may be either.
        has_nan = numbers.isnan().any().to(numbers.dtype)
        largest = numbers.nan_to_num(nan=lowest).max() if values.numel() else numbers.new_full((), lowest)
        largest, has_nan = state.all_reduce(torch.stack([largest, has_nan]), "max", description)
        result = torch.where(has_nan > 0, float("nan"), largest) if values.is_floating_point() else largest
        ctx.save_for_backward(values == result)
        return result.to(values.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (is_largest,) = ctx.saved_tensors
        count = ctx.state.all_reduce(is_largest.sum(), "sum", "the gradient of a maximum")
        return is_largest * (mean_gradient(gradient, ctx.state) / count).to(gradient.dtype), None, None


def mean_gradient(gradient: Tensor, state: SharedState) -> Tensor:
    """Collective. Return the mean of the ranks' gradients of a full value, which is that of their mean loss."""
    return state.all_reduce(gradient.double(), "sum", "a gradient").div_(state.num_ranks).to(gradient.dtype)


class _ToShard(torch.autograd.Function):
    """Returns the part of a tensor, which all ranks have, that meets the elements of a shard."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, place: ShardPlace) -> Tensor:
        ctx.place, ctx.size = place, value.shape
        if value.numel() == 1:  # of no dims, it decides about no types
            return value.clone()
        return place.narrow(torch.broadcast_to(value, place.table.shape)).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # DDP averages over the ranks, of which each has the gradients of its shard alone.
        gradient = gradient * ctx.place.table.state.num_ranks
        if gradient.shape == ctx.size:
            return gradient, None
        full = gradient.new_zeros(ctx.place.table.shape)
        ctx.place.narrow(full).copy_(gradient)
        return full.sum_to_size(ctx.size), None


def to_shard(value: Tensor, place: ShardPlace) -> Tensor:
    """Return the part at `place` of a tensor that fits the table. Raises RuntimeError: its shape does not."""
    if value.requires_grad and torch.is_grad_enabled():
        return _ToShard.apply(value, place)  # type: ignore[no-any-return]
    if value.numel() == 1:
        return value
    # Each element of the shard meets the element that it would meet in the full table.
    return place.narrow(torch.broadcast_to(value, place.table.shape))


def refuse_unequal(value: Tensor, place: ShardPlace) -> None:
    """Collective. Raise ShardedWeightError where ranks have other values: each would treat its rows by its own."""
    if isinstance(value, torch.nn.Parameter):  # DDP keeps them equal
        return
    numbers = value.detach().contiguous().view(-1).view(torch.uint8).long()
    weighted = numbers * torch.arange(1, len(numbers) + 1, device=numbers.device)
    digest = torch.stack([numbers.sum(), weighted.sum()])
    largest, smallest = place.table.state.all_reduce(torch.stack([digest, -digest]), "max", "a comparison").tolist()
    if largest != [-number for number in smallest]:
        raise place.refusal("an operation with a tensor that differs between the ranks")
