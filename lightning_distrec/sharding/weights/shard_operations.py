"""Operations on shards: of their elements, each alone, and reductions over all elements of a table
on several ranks.

Elements are those of a weight, of its gradient, and of rows that are written. Reductions are sums,
norms and extremes. Values and gradients have two forms. A full value is on every rank, and its
gradient there is of this rank's loss only: DDP averages those. A shard's gradient is final, the
mean over the ranks' losses. Functions between the forms change gradients with the values: from
shards to a full value by a mean over ranks, back by as many times what one rank has.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_distrec.sharding.weights.shard_access import (
    Operation,
    ShardPlace,
    SharedState,
    without_guard,
)


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


NORMS = words("norm vector_norm linalg_vector_norm linalg_norm frobenius_norm")
WITHOUT_ZEROS = NORMS | words("sum mean any count_nonzero")
"""What needs no elements that are 0, so that the values of a sparse gradient are enough."""
INPUTS = ("input", "self", "x")
ORDERS = ("p", "ord")


def is_reduction(place: ShardPlace, name: str, args: Any, kwargs: Any) -> bool:
    """Whether this reduces all elements to one number, and every rank computes it now."""
    options = {key for key, value in kwargs.items() if value not in (None, False)}
    options -= {*INPUTS, *ORDERS, "dtype"}
    # Norms have their order in this place, the others dims or another tensor.
    has_dims = len(args) > 2 or len(args) == 2 and name not in NORMS
    return name in REDUCTIONS and place.table.has_single_shards and not options and not has_dims


def reduce_over_ranks(name: str, args: Any, kwargs: Any) -> Tensor:
    """Collective. Return a number of all elements of a table, (), the same on every rank."""
    values = args[0] if args else next(kwargs[key] for key in INPUTS if key in kwargs)
    order = next(
        (kwargs[key] for key in ORDERS if kwargs.get(key) is not None),
        args[1] if args[1:] else None,
    )
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
    kind = result = torch.int64
    if values.is_floating_point():
        # In float64, so that the result hardly depends on how the table is sharded.
        kind = torch.float64
        result = values.dtype
    total = values.sum(dtype=kind)
    summed: Tensor = _SumOverRanks.apply(total, place.table.state, f"the sum of {place.table.name}")
    return summed.to(result)


def _mean(values: Tensor, place: ShardPlace) -> Tensor:
    return _sum(values, place) / (place.table.shape[0] * place.table.shape[1])


def _norm(values: Tensor, power: float, place: ShardPlace) -> Tensor:
    if power == float("inf"):
        return _max(values.abs(), place)
    total = _sum(values.square() if power == 2.0 else values.abs().pow(power), place)
    # The gradient of a norm that is 0 is 0, as torch has it.
    base = torch.where(total == 0, 1.0, total)
    return base.pow(1.0 / power) * (total != 0)


def _var(values: Tensor, place: ShardPlace) -> Tensor:
    num_elements = place.table.shape[0] * place.table.shape[1]
    mean = to_shard(_mean(values, place), place)
    return _sum((values - mean).square(), place) / (num_elements - 1)


def _max(values: Tensor, place: ShardPlace) -> Tensor:
    largest: Tensor = _MaxOverRanks.apply(
        values, place.table.state, f"the maximum of {place.table.name}"
    )
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
    """Returns the largest element of all shards, (), or NaN where there is one. Equal ones share
    its gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, state: SharedState, description: str) -> Tensor:
        ctx.state = state
        numbers = values.double() if values.is_floating_point() else values.long()
        lowest = float("-inf") if values.is_floating_point() else torch.iinfo(torch.int64).min
        # gloo's maximum of a number and NaN may be either.
        has_nan = numbers.isnan().any().to(numbers.dtype)
        largest = (
            numbers.nan_to_num(nan=lowest).max() if values.numel() else numbers.new_full((), lowest)
        )
        largest, has_nan = state.all_reduce(torch.stack([largest, has_nan]), "max", description)
        result = largest
        if values.is_floating_point():
            result = torch.where(has_nan > 0, float("nan"), largest)
        ctx.save_for_backward(values == result)
        return result.to(values.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (is_largest,) = ctx.saved_tensors
        count = ctx.state.all_reduce(is_largest.sum(), "sum", "the gradient of a maximum")
        share = (mean_gradient(gradient, ctx.state) / count).to(gradient.dtype)
        return is_largest * share, None, None


def mean_gradient(gradient: Tensor, state: SharedState) -> Tensor:
    """Collective. Return the mean of the ranks' gradients of a full value, which is that of their
    mean loss."""
    return (
        state
        .all_reduce(gradient.double(), "sum", "a gradient")
        .div_(state.num_ranks)
        .to(gradient.dtype)
    )


class _ToShard(torch.autograd.Function):
    """Returns the part of a tensor, which all ranks have, that meets the elements of a shard."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, place: ShardPlace) -> Tensor:
        ctx.place = place
        ctx.size = value.shape
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
    """Return the part at `place` of a tensor that fits the table. Raises RuntimeError: its shape
    does not."""
    if value.requires_grad and torch.is_grad_enabled():
        return _ToShard.apply(value, place)  # type: ignore[no-any-return]
    if value.numel() == 1:
        return value
    # Each element of the shard meets the element that it would meet in the full table.
    return place.narrow(torch.broadcast_to(value, place.table.shape))


def refuse_unequal(value: Tensor, place: ShardPlace) -> None:
    """Collective. Raise ShardedWeightError where ranks have other values: each would treat its rows
    by its own."""
    if isinstance(value, torch.nn.Parameter):  # DDP keeps them equal
        return
    numbers = value.detach().contiguous().view(-1).view(torch.uint8).long()
    weighted = numbers * torch.arange(1, len(numbers) + 1, device=numbers.device)
    digest = torch.stack([numbers.sum(), weighted.sum()])
    largest, smallest = place.table.state.all_reduce(
        torch.stack([digest, -digest]), "max", "a comparison"
    ).tolist()
    if largest != [-number for number in smallest]:
        raise place.refusal("an operation with a tensor that differs between the ranks")


FUNCTIONS = words("""
    abs add addcdiv addcmul bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max
    clamp_min clip clone contiguous copy copysign div divide detach erf erfinv eq exp expm1 fill
    float floor floor_divide fmod full_like ge gt half bfloat16 double isfinite isinf isnan le lerp
    log log1p log2 log10 logical_and logical_not logical_or logical_xor lt maximum minimum mul
    multiply nan_to_num ne neg negative ones_like pow positive reciprocal relu remainder round rsqrt
    sgn sigmoid sign sqrt square sub subtract tanh to true_divide trunc type_as where zero
    zeros_like empty_like cpu cuda coalesce masked_fill softplus hardtanh threshold view_as
""")
OPERATORS = words("""
    abs add and div eq floordiv ge gt invert le lt mod mul ne neg or pos pow radd rdiv rmod rmul
    rpow rsub rtruediv sub truediv xor
""")
IN_PLACE_OPERATORS = frozenset(f"__i{name}__" for name in OPERATORS)
ELEMENTWISE = (
    FUNCTIONS
    | {f"{name}_" for name in FUNCTIONS}
    | {f"__{name}__" for name in OPERATORS}
    | IN_PLACE_OPERATORS
)
"""Operations of torch and of Tensor that treat every element alone, so that they are exact on a
shard."""


def is_in_place(name: str) -> bool:
    """Whether a function or method of torch with this name writes to its first argument."""
    return name.endswith("_") and not name.endswith("__") or name in IN_PLACE_OPERATORS


def is_elementwise(name: str, args: Any) -> bool:
    """Whether an operation treats every element alone."""
    if name in ("max", "min"):
        return len(args) == 2 and isinstance(args[1], Tensor)
    return name.removeprefix("_foreach_") in ELEMENTWISE


def is_guarded(value: Any) -> bool:
    """Whether these are values of a shard."""
    return isinstance(value, Tensor) and hasattr(value, "place")


def first_of(args: Any) -> Any:
    """Return the first argument; torch._foreach's is the first of a list."""
    while isinstance(args, (list, tuple)):
        args = args[0]
    return args


def compute(func: Operation, args: Any, kwargs: Any, place: ShardPlace) -> Any:
    """Call an elementwise operation on the elements at `place`, in plain tensors."""
    args, kwargs = apply_to_collection([args, kwargs], Tensor, _local, place)
    # torch's own add_ of a sparse gradient to a dense shard goes past the rows without values.
    if any(tensor.is_sparse for tensor in tensors_in([args, kwargs])) and (
        first_of(args).is_sparse or func.__name__ not in ("add_", "__iadd__")
    ):
        return _compute_sparse(func, args, kwargs, place)
    return func(*args, **kwargs)


def _local(value: Tensor, place: ShardPlace) -> Tensor:
    """Return the part at `place` of a tensor that fits the table; one of one element as it is."""
    if is_guarded(value):
        shard: Any = value
        place.refuse_unlike(shard.place)
        return value
    if place.table.state.in_step:
        refuse_unequal(value, place)
    try:
        return to_shard(value, place)
    except RuntimeError:
        raise place.refusal(f"an operation with a tensor of shape {tuple(value.shape)}") from None


def _compute_sparse(func: Operation, args: Any, kwargs: Any, place: ShardPlace) -> Any:
    """Call an operation on sparse gradients. The result is sparse where elements that are 0 stay
    0."""
    target = first_of(args)
    in_place = is_in_place(func.__name__)
    if func.__name__.startswith("_foreach_"):
        raise place.refusal(f"{func.__name__} of sparse gradients")
    tensors = tensors_in([args, kwargs])
    rows, *other_rows = [tensor.coalesce().indices() for tensor in tensors if tensor.is_sparse]

    def call(convert: Callable[[Tensor], Tensor]) -> Tensor:
        values, options = apply_to_collection([args, kwargs], Tensor, convert)
        return func(*values, **options)  # type: ignore[no-any-return]

    is_alone = all(tensor.is_sparse or tensor.numel() == 1 for tensor in tensors)
    has_same_rows = all(torch.equal(rows, other) for other in other_rows)
    if is_alone and has_same_rows and not call(_as_zero).any():
        values = call(
            lambda tensor: tensor.coalesce().values().clone() if tensor.is_sparse else tensor
        )
        result = torch.sparse_coo_tensor(
            rows, values, target.shape, is_coalesced=True, check_invariants=False
        )
        return target.copy_(result) if in_place else result
    dense = call(lambda tensor: tensor.to_dense() if tensor.is_sparse else tensor)
    if in_place and target.is_sparse:
        weight = next(weight for weight in place.table.weights if weight.place.key == place.key)
        if weight.grad is not target:
            raise place.refusal(f"{func.__name__} on a gradient that is not the weight's any more")
        weight.grad = dense
    return dense


def _as_zero(tensor: Tensor) -> Tensor:
    """Return an element of a sparse gradient that it has no value of, and other tensors as a
    copy."""
    return (
        tensor.new_zeros(1, layout=torch.strided) if tensor.is_sparse else tensor.detach().clone()
    )


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    tensors: list[Tensor] = []
    apply_to_collection(value, Tensor, tensors.append)
    return tensors


def write_rows(target: Any, index: Any, value: Any) -> None:
    """Write to elements that a mask of the shard selects, or to rows by their numbers in the table,
    as `[...] =` does.

    Raises ShardedWeightError: the index is of another kind.
    """
    place: ShardPlace = target.place
    if is_guarded(index) and index.dtype == torch.bool:
        compute(Tensor.masked_fill_, (target, index, value), {}, place)
        return
    if index is ... or isinstance(index, slice) and index == slice(None):
        write = Tensor.copy_ if isinstance(value, Tensor) else Tensor.fill_
        compute(write, (target, value), {}, place)
        return
    if isinstance(index, tuple) or is_guarded(index) or is_guarded(value) or target.is_sparse:
        raise place.refusal("__setitem__ with such an index")
    plain = target.detach()
    num_rows, num_columns = place.table.shape
    rows = torch.arange(num_rows, device=plain.device)[index]
    values = torch.as_tensor(value, dtype=plain.dtype, device=plain.device).expand(
        *rows.shape, num_columns
    )
    rows = rows.reshape(-1)
    values = values.reshape(-1, num_columns)
    is_local = (rows >= place.row) & (rows < place.row + place.num_rows)
    columns = slice(place.column, place.column + place.num_columns)
    plain[rows[is_local] - place.row] = values[is_local, columns]
