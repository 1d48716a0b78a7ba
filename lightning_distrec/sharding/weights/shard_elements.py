"""Operations on the elements of a shard, each alone: of its weight, of its gradient, and of rows that are written."""

from collections.abc import Callable
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_distrec.sharding.weights.reductions import refuse_unequal, to_shard
from lightning_distrec.sharding.weights.shard_access import ShardPlace


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


FUNCTIONS = words("""
    abs add addcdiv addcmul bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip clone
    contiguous copy copysign div divide detach erf erfinv eq exp expm1 fill float floor floor_divide fmod full_like ge
    gt half bfloat16 double isfinite isinf isnan le lerp log log1p log2 log10 logical_and logical_not logical_or
    logical_xor lt maximum minimum mul multiply nan_to_num ne neg negative ones_like pow positive reciprocal relu
    remainder round rsqrt sgn sigmoid sign sqrt square sub subtract tanh to true_divide trunc type_as where zero
    zeros_like empty_like cpu cuda coalesce masked_fill softplus hardtanh threshold
""")
OPERATORS = words("""
    abs add and div eq floordiv ge gt invert le lt mod mul ne neg or pos pow radd rdiv rmod rmul rpow rsub rtruediv sub
    truediv xor
""")
IN_PLACE_OPERATORS = frozenset(f"__i{name}__" for name in OPERATORS)
ELEMENTWISE = (
    FUNCTIONS | {f"{name}_" for name in FUNCTIONS} | {f"__{name}__" for name in OPERATORS} | IN_PLACE_OPERATORS
)
"""Operations of torch and of Tensor that treat every element alone, so that they are exact on a shard."""


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


def compute(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], place: ShardPlace) -> Any:
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
        if shard.place.key != place.key:
            raise place.refusal(f"an operation with '{shard.place.table.name}'")
        return value
    if place.table.state.in_step:
        refuse_unequal(value, place)
    try:
        return to_shard(value, place)
    except RuntimeError:
        raise place.refusal(f"an operation with a tensor of shape {tuple(value.shape)}") from None


def _compute_sparse(func: Callable[..., Any], args: Any, kwargs: dict[str, Any], place: ShardPlace) -> Any:
    """Call an operation on sparse gradients. The result is sparse where elements that are 0 stay 0."""
    target, in_place = first_of(args), is_in_place(func.__name__)
    if func.__name__.startswith("_foreach_"):
        raise place.refusal(f"{func.__name__} of sparse gradients")
    tensors = tensors_in([args, kwargs])
    rows, *other_rows = [tensor.coalesce().indices() for tensor in tensors if tensor.is_sparse]

    def call(convert: Callable[[Tensor], Tensor]) -> Tensor:
        values, options = apply_to_collection([args, kwargs], Tensor, convert)
        return func(*values, **options)  # type: ignore[no-any-return]

    is_alone = all(tensor.is_sparse or tensor.numel() == 1 for tensor in tensors)
    if is_alone and all(torch.equal(rows, other) for other in other_rows) and not call(_as_zero).any():
        values = call(lambda tensor: tensor.coalesce().values().clone() if tensor.is_sparse else tensor)
        result = torch.sparse_coo_tensor(rows, values, target.shape, is_coalesced=True, check_invariants=False)
        return target.copy_(result) if in_place else result
    dense = call(lambda tensor: tensor.to_dense() if tensor.is_sparse else tensor)
    if in_place and target.is_sparse:
        weight = next(weight for weight in place.table.weights if weight.place.key == place.key)
        if weight.grad is not target:
            raise place.refusal(f"{func.__name__} on a gradient that is not the weight's any more")
        weight.grad = dense
    return dense


def _as_zero(tensor: Tensor) -> Tensor:
    """Return an element of a sparse gradient that it has no value of, and other tensors as a copy."""
    return tensor.new_zeros(1, layout=torch.strided) if tensor.is_sparse else tensor.detach().clone()


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    tensors: list[Tensor] = []
    apply_to_collection(value, Tensor, tensors.append)
    return tensors


def write_rows(target: Any, index: Any, value: Any) -> None:
    """Write to elements that a mask of the shard selects, or to rows by their numbers in the table, as `[...] =` does.

    Raises ShardedWeightError: the index is of another kind.
    """
    place: ShardPlace = target.place
    if is_guarded(index) and index.dtype == torch.bool:
        compute(Tensor.masked_fill_, (target, index, value), {}, place)
        return
    if index is ... or isinstance(index, slice) and index == slice(None):
        compute(Tensor.copy_ if isinstance(value, Tensor) else Tensor.fill_, (target, value), {}, place)
        return
    if isinstance(index, tuple) or is_guarded(index) or is_guarded(value) or target.is_sparse:
        raise place.refusal("__setitem__ with such an index")
    plain = target.detach()
    num_rows, num_columns = place.table.shape
    rows = torch.arange(num_rows, device=plain.device)[index]
    values = torch.as_tensor(value, dtype=plain.dtype, device=plain.device).expand(*rows.shape, num_columns)
    rows, values = rows.reshape(-1), values.reshape(-1, num_columns)
    is_local = (rows >= place.row) & (rows < place.row + place.num_rows)
    columns = slice(place.column, place.column + place.num_columns)
    plain[rows[is_local] - place.row] = values[is_local, columns]
