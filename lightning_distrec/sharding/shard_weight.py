"""The parameters that a module shows of a sharded table: this rank's shard, guarded against being taken for the table.

User code sees the table's shape. Elementwise operations (averages, clamps, decay) are exact on shards and run on them.
Sums and norms in a step run over all ranks (collective_reads.py). Random draws, also in torch.nn.init, run for the full
table on every rank, which keeps its shard: rows of ranks differ, and generators have drawn what they draw in one
process. Everything else that needs values is refused, naming the table. Optimizers, torchrec and our own code work on
the shards as they are.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_distrec._compat.torch import use_foreach_for
from lightning_distrec.errors import ShardedWeightError
from lightning_distrec.host_memory import free_host_bytes
from lightning_distrec.sharding.collective_reads import SUMS, is_sum_in_step, sum_over_ranks
from lightning_distrec.sharding.shard_access import GuardedTable, ShardPlace, rewriting, without_guard, write_back
from lightning_distrec.units import format_bytes

INIT = "torch.nn.init"
OWN = ("lightning_distrec.", "torchrec.", "fbgemm_gpu.")
OWN_OF_TORCH = ("torch.optim", "torch.amp", "torch.cuda.amp", "torch.distributed", "torch.nn.parallel", "torch._dynamo")
VALUES = frozenset({"data", "grad", "T", "mT", "H", "mH", "real", "imag", "data ="})
"""Attributes with values; the others describe a tensor."""
SHAPES = frozenset({"shape", "ndim", "size", "dim", "ndimension", "numel", "nelement", "nbytes", "__len__"})


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


DESCRIBES = _words("""
    __hash__ __repr__ __format__ stride storage_offset is_contiguous is_floating_point is_complex element_size data_ptr
    untyped_storage get_device requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook type
    share_memory_ __deepcopy__ new_tensor is_pinned _has_compatible_shallow_copy_type backward
""")
"""Methods that read no values, or that copy and print all that this rank has."""
DRAWS = _words("normal_ uniform_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_")
DRAWS_LIKE = _words("randn_like rand_like randint_like")
FUNCTIONS = _words("""
    abs add addcdiv addcmul bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clip clone
    contiguous copy copysign div divide detach erf erfinv eq exp expm1 fill float floor floor_divide fmod full_like ge
    gt half bfloat16 double isfinite isinf isnan le lerp log log1p log2 log10 logical_and logical_not logical_or
    logical_xor lt maximum minimum mul multiply nan_to_num ne neg negative ones_like pow positive reciprocal relu
    remainder round rsqrt sgn sigmoid sign sqrt square sub subtract tanh to true_divide trunc type_as where zero
    zeros_like empty_like cpu cuda coalesce masked_fill softplus hardtanh threshold
""")
OPERATORS = _words("""
    abs add and div eq floordiv ge gt invert le lt mod mul ne neg or pos pow radd rdiv rmod rmul rpow rsub rtruediv sub
    truediv xor
""")
IN_PLACE_OPERATORS = frozenset(f"__i{name}__" for name in OPERATORS)
ELEMENTWISE = (
    FUNCTIONS | {f"{name}_" for name in FUNCTIONS} | {f"__{name}__" for name in OPERATORS} | IN_PLACE_OPERATORS
)
"""Operations of torch and of Tensor that treat every element alone, so that they are exact on a shard."""
READ_GRADIENT: Any = Tensor.grad.__get__  # type: ignore[union-attr]


def _guarded(_: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    # `==`, not `is`: each read of `Tensor.grad.__get__` makes another method wrapper.
    if func == READ_GRADIENT:  # zero_grad asks each weight at each step, and most have none
        with without_guard():
            if args[0].grad is None:
                return None
    name, is_attribute = func.__name__, False
    if name in ("__get__", "__set__", "__delete__"):
        is_attribute = True
        attribute = func.__self__.__name__  # type: ignore[attr-defined]
        name = attribute if name == "__get__" else "data =" if attribute == "data" else "setting another"
    # By the code that calls: a read of the shard is right in an optimizer, and wrong in the user's step.
    reads_values = name in VALUES | SHAPES if is_attribute else name not in DESCRIBES
    if not reads_values or is_called_by_us(inspect.currentframe()):
        with without_guard():
            return func(*args, **kwargs)
    if name in SHAPES:
        return func(_first(args).place.meta(), *args[1:], **kwargs)
    if _is_in_place(name):
        with rewriting():
            return _in_user_code(func, name, is_attribute, args, kwargs)
    write_back()
    return _in_user_code(func, name, is_attribute, args, kwargs)


class ShardValues(Tensor):
    """Values of a shard, element by element: of its weight, of its gradient, or computed from them."""

    place: ShardPlace
    __torch_function__: Any = classmethod(_guarded)


class ShardWeight(nn.Parameter):
    """The weight of a shard, (num_rows, num_columns) of this rank."""

    place: ShardPlace
    __torch_function__: Any = classmethod(_guarded)


# torch's optimizers take their foreach path for types that they list, by exact type.
use_foreach_for(ShardWeight)


def guard(table: GuardedTable, places: list[tuple[int, int]]) -> None:
    """Turn this rank's shards of a table into guarded ones, in place. places: first row and column of each."""
    for weight, (row, column) in zip(table.weights, places, strict=True):
        rows, columns = weight.shape
        # By its class: kernels, optimizers and the module tree hold references to this object. The class adds methods
        # only, so that the object's memory layout fits.
        weight.__class__ = ShardWeight
        weight.place = ShardPlace(table, row, column, rows, columns)


def is_called_by_us(frame: FrameType | None) -> bool:
    """Whether our code asks, torchrec's or an optimizer's, and not user code."""
    frame = None if frame is None else frame.f_back
    while frame is not None:
        module: str = frame.f_globals.get("__name__", "")
        if module.startswith("torch."):
            if module.startswith(OWN_OF_TORCH):
                return True
            frame = frame.f_back  # torch's Python around an operator
            continue
        return module.startswith(OWN) or _is_in_optimizer(frame)
    return True


def _is_in_optimizer(frame: FrameType | None) -> bool:
    """Whether this is code of an optimizer of the user's own."""
    # Up to the Trainer: a step that an optimizer's closure calls is user code again, and Lightning lies in between.
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("lightning"):
        if isinstance(frame.f_locals.get("self"), Optimizer):
            return True
        frame = frame.f_back
    return False


def _in_user_code(func: Callable[..., Any], name: str, is_attribute: bool, args: Any, kwargs: dict[str, Any]) -> Any:
    shard = _shards_in([args, kwargs])[0]
    place: ShardPlace = shard.place
    if is_attribute:
        if name == "data =":
            target, value = args
            with without_guard():  # a module that is moved to the device where it is
                if target.data_ptr() == value.data_ptr() and target.dtype == value.dtype:
                    return None
            raise place.refusal(name)
        if name in ("data", "grad"):
            with without_guard():
                return _wrap(func(*args), place if name == "data" else replace(place, kind="gradient"))
    elif name == "__reduce_ex__":
        raise place.refusal("to pickle it, which full_parameter and full_state_dict() are for")
    elif getattr(func, "__module__", "") == INIT:  # normal_, constant_ and others hand themselves over
        full = _full_like(shard)
        func(**kwargs | {"tensor": full})
        with torch.no_grad():
            return _fill(shard, full)
    elif name in DRAWS and shard is args[0]:
        if place.kind != "weight":
            raise place.refusal(name)
        full = _full_like(shard)
        func(full, *args[1:], **kwargs)
        return _fill(shard, full)
    elif name in DRAWS_LIKE:
        if not place.table.has_single_shards:
            raise place.refusal(name)
        return _wrap(place.narrow(func(_full_like(args[0]), *args[1:], **kwargs)), place)
    elif name in SUMS and is_sum_in_step(place, args, kwargs):
        return sum_over_ranks(name, args, kwargs)
    elif name == "equal":  # Lightning looks a parameter up in param groups so; shards of two tables may be alike
        return _same_place(*args)
    elif name.removeprefix("_foreach_") in ELEMENTWISE:
        if _is_in_place(name):
            place.note_write()
            # A full weight that was gathered before is stale from here on.
            place.table.state.num_changes += 1
            if not isinstance(_first(args), (ShardValues, ShardWeight)):
                raise place.refusal(f"{name} into a tensor that is none of its shards")
        with without_guard():
            args, kwargs = apply_to_collection([args, kwargs], Tensor, _local, place)
            return _wrap(func(*args, **kwargs), place)
    if place.table.gathering is None or place.kind != "weight":
        raise place.refusal(name)
    args, kwargs = apply_to_collection([args, kwargs], Tensor, _gathered)
    return func(*args, **kwargs)


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") or name in IN_PLACE_OPERATORS


def _same_place(*tensors: Any) -> bool:
    """Return torch.equal of two tensors, of which one is a shard's: False where they are of different shards."""
    if len({tensor.place.key if hasattr(tensor, "place") else None for tensor in tensors}) > 1:
        return False
    with without_guard():
        return torch.equal(*tensors)


def _first(args: Any) -> Any:
    while isinstance(args, (list, tuple)):
        args = args[0]
    return args


def _shards_in(value: Any) -> list[Any]:
    if isinstance(value, (ShardValues, ShardWeight)):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [shard for part in parts for shard in _shards_in(part)]


def _gathered(value: Any) -> Tensor:
    """Return the full table in the place of a shard, and other tensors as they are."""
    if not isinstance(value, (ShardValues, ShardWeight)):
        return value
    table: GuardedTable = value.place.table
    if table.gathering is None or value.place.kind != "weight":
        raise value.place.refusal("together with a gathered weight")
    return table.gathering.full(value)  # type: ignore[no-any-return]


def _local(value: Tensor, place: ShardPlace) -> Tensor:
    """Return the part at `place` of a tensor that fits the table; one of one element as it is."""
    if isinstance(value, (ShardValues, ShardWeight)):
        if value.place.key != place.key:
            raise place.refusal(f"an operation with '{value.place.table.name}'")
        return value
    if value.numel() == 1:
        return value
    try:
        # Each element of the shard meets the element that it would meet in the full table.
        return place.narrow(torch.broadcast_to(value, place.table.shape))
    except RuntimeError:
        raise place.refusal(f"an operation with a tensor of shape {tuple(value.shape)}") from None


def _wrap(result: Any, place: ShardPlace) -> Any:
    """Return values that were computed element by element as guarded ones."""

    def wrap(value: Any) -> Any:
        if isinstance(value, (ShardWeight, ShardValues)):
            return value
        values: Any = value if value.is_sparse else value.as_subclass(ShardValues)
        values.__class__ = ShardValues  # torch makes no subclass of sparse tensors
        values.place = place
        return values

    return apply_to_collection(result, Tensor, wrap)


def _full_like(shard: Any) -> Tensor:
    """Return an empty tensor of the table's shape. Raises ShardedWeightError: there is no memory for it."""
    shape = shard.place.meta().shape
    with without_guard():
        device, dtype = shard.device, shard.dtype
    # Checked before: on the host, Linux kills a process that takes too much, without an error.
    num_bytes = shape.numel() * dtype.itemsize
    free = free_host_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if num_bytes > free:
        raise ShardedWeightError(
            f"table '{shard.place.table.name}': to draw its weight takes {format_bytes(num_bytes)} on every rank, and "
            f"{format_bytes(free)} are free. Build it in configure_model: each rank draws its rows by the init_fn."
        )
    return torch.empty(shape, dtype=dtype, device=device)


def _fill(shard: Any, full: Tensor) -> Any:
    """Copy this rank's rectangles of a full table into `shard`, or into all of its shards where there are several."""
    place: ShardPlace = shard.place
    with without_guard():
        # torch's own error: user code gets it unsharded too, and no_grad below would hide it.
        if shard.requires_grad and shard.is_leaf and torch.is_grad_enabled():
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        if not place.stands_for_table:
            return shard
        if not place.table.has_single_shards and shard.data_ptr() != place.table.weights[0].data_ptr():
            raise place.refusal("a random draw into a copy")
        place.note_write()
        for target in [shard] if place.table.has_single_shards else place.table.weights:
            with torch.no_grad():
                target.detach().copy_(target.place.narrow(full))
    return shard
