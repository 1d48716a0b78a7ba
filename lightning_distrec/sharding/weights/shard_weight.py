"""The parameters that a module shows of a sharded table: this rank's shard, guarded against being taken for the table.

User code sees the table's shape. Elementwise operations (averages, clamps, decay) are exact on shards and run on them.
Random draws, and the functions of torch.nn.init, run on the full shape (draws.py); sums and norms in a step run over
all ranks (sums.py). Everything else that needs values is refused, naming the table. Optimizers, torchrec and our own
code work on the shards as they are.
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_distrec._compat.torch import use_foreach_for
from lightning_distrec.sharding.weights.draws import DRAWS, DRAWS_LIKE, INIT, draw, draw_like, initialize
from lightning_distrec.sharding.weights.elementwise import is_elementwise
from lightning_distrec.sharding.weights.gathered import Gathering
from lightning_distrec.sharding.weights.row_caches import rewriting, write_back
from lightning_distrec.sharding.weights.shard_of import ShardOf, without_guard
from lightning_distrec.sharding.weights.sums import SUMS, is_sum_in_step, sum_over_ranks

OWN = ("lightning_distrec.", "torchrec.", "fbgemm_gpu.")
OWN_OF_TORCH = ("torch.optim", "torch.amp", "torch.cuda.amp", "torch.distributed", "torch.nn.parallel", "torch._dynamo")
VALUES = frozenset({"data", "grad", "T", "mT", "H", "mH", "real", "imag", "data ="})
"""Attributes with values; the others describe a tensor."""
SHAPES = frozenset({"shape", "ndim", "size", "dim", "ndimension", "numel", "nelement", "nbytes", "__len__"})
DESCRIBES = frozenset([
    "__hash__",
    "__repr__",
    "__format__",
    "stride",
    "storage_offset",
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "element_size",
    "data_ptr",
    "untyped_storage",
    "get_device",
    "requires_grad_",
    "retain_grad",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "type",
    "share_memory_",
    "__deepcopy__",
    "new_tensor",
    "is_pinned",
    "_has_compatible_shallow_copy_type",
    "backward",
])
"""Methods that read no values, or that copy and print all that this rank has."""


READ_GRADIENT: Any = Tensor.grad.__get__  # type: ignore[union-attr]


def _guarded(_: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    if func == READ_GRADIENT:  # zero_grad asks each weight at each step, and most have none
        with without_guard():
            if args[0].grad is None:
                return None
    name, is_attribute = func.__name__, False
    if name in ("__get__", "__set__", "__delete__"):
        is_attribute = True
        attribute = func.__self__.__name__  # type: ignore[attr-defined]
        name = attribute if name == "__get__" else "data =" if attribute == "data" else "setting another"
    caller = _caller(inspect.currentframe())
    if caller == OWN or (name in DESCRIBES if not is_attribute else name not in VALUES | SHAPES):
        with without_guard():
            return func(*args, **kwargs)
    if name in SHAPES:
        return func(_first(args).of.meta(), *args[1:], **kwargs)
    if caller == INIT or getattr(func, "__module__", "") == INIT:
        with rewriting():
            return initialize(func, name, args, kwargs)
    if _is_in_place(name):
        with rewriting():
            return _in_user_code(func, name, is_attribute, args, kwargs)
    write_back()
    return _in_user_code(func, name, is_attribute, args, kwargs)


class ShardValues(Tensor):
    """Values of a shard, element by element: of its weight, of its gradient, or computed from them."""

    of: ShardOf
    __torch_function__: Any = classmethod(_guarded)


class ShardWeight(nn.Parameter):
    """The weight of a shard, (num_rows, num_columns) of this rank."""

    of: ShardOf
    __torch_function__: Any = classmethod(_guarded)


use_foreach_for(ShardWeight)


def guard(
    weights: list[nn.Parameter],
    table: str,
    shape: tuple[int, int],
    places: list[tuple[int, int]],
    alone: bool,
    loss_weight: Callable[[], float],
    gathering: Gathering | None,
    group: Any = None,
) -> None:
    """Turn this rank's shards of a table into guarded ones, in place.

    places: first row and column of each. alone: whether no rank has more than one. loss_weight,
    gathering, group: see ShardOf.
    """
    held: list[Any] = list(weights)
    for weight, (row, column) in zip(held, places, strict=True):
        rows, columns = weight.shape
        # By its class: kernels, optimizers and the module tree hold references to this object. The class adds methods
        # only, so that the object's memory layout fits.
        weight.__class__ = ShardWeight
        weight.of = ShardOf(table, shape, row, column, rows, columns, held, alone, loss_weight, gathering, group)


def _caller(frame: FrameType | None) -> Any:
    """Return who asks: OWN for our code, torchrec's and optimizers', INIT for torch.nn.init, "" for user code."""
    frame = None if frame is None else frame.f_back
    while frame is not None:
        module: str = frame.f_globals.get("__name__", "")
        if module.startswith("torch."):
            if module == INIT:
                return INIT
            if module.startswith(OWN_OF_TORCH):
                return OWN
            frame = frame.f_back  # torch's Python around an operator
            continue
        return OWN if module.startswith(OWN) or _is_in_optimizer(frame) else ""
    return OWN


def _is_in_optimizer(frame: FrameType | None) -> bool:
    """Whether this is code of an optimizer of the user's own."""
    while frame is not None and not frame.f_globals.get("__name__", "").startswith((
        "lightning",
        "tests.support.ranks",
    )):
        if isinstance(frame.f_locals.get("self"), Optimizer):
            return True
        frame = frame.f_back
    return False


def _in_user_code(func: Callable[..., Any], name: str, is_attribute: bool, args: Any, kwargs: dict[str, Any]) -> Any:
    target: Any = _guarded_in([args, kwargs])[0]
    of: ShardOf = target.of
    if name == "data =" and _shares_memory(*args):  # a module that is moved to the device where it is
        return None
    if is_attribute and name in ("data", "grad"):
        with without_guard():
            return _wrap(func(*args), of if name == "data" else replace(of, what="gradient"))
    if name == "__reduce_ex__":
        raise of.refusal("to pickle it, which full_parameter and full_state_dict() are for")
    if name in DRAWS and target is args[0]:
        return draw(func, name, args, kwargs)
    if name in DRAWS_LIKE:
        return _wrap(draw_like(func, args, kwargs), of)
    if name in SUMS and is_sum_in_step(of, args, kwargs):
        return sum_over_ranks(name, args, kwargs)
    if name == "equal":  # Lightning looks a parameter up in param groups so; shards of two tables may be alike
        return _same_place(*args)
    if (is_attribute and name != "data =") or not (is_attribute or is_elementwise(name)):
        if of.gathering is not None and of.what == "weight":
            return func(*_gathered(args), **_gathered(kwargs))
        raise of.refusal(name)
    is_in_place = _is_in_place(name)
    if is_attribute:
        raise of.refusal(name)
    if is_in_place:
        of.note_write()
        Gathering.forget_all()
    if is_in_place and not isinstance(_first(args), (ShardValues, ShardWeight)):
        raise of.refusal(f"{name} into a tensor that is none of its shards")
    with without_guard():
        return _wrap(func(*_local(args, of), **_local(kwargs, of)), of)


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") or name.startswith("__i")


def _same_place(one: Any, other: Any) -> bool:
    """Return torch.equal of two tensors, of which one is a shard's: False where they are of different shards."""
    places = {(of.table, of.row, of.column) if of else None for t in (one, other) for of in [getattr(t, "of", None)]}
    if len(places) > 1:
        return False
    with without_guard():
        return torch.equal(one, other)


def _shares_memory(target: Any, value: Tensor) -> bool:
    with without_guard():
        return target.data_ptr() == value.data_ptr() and target.dtype == value.dtype


def _first(args: Any) -> Any:
    while isinstance(args, (list, tuple)):
        args = args[0]
    return args


def _guarded_in(value: Any) -> list[Any]:
    if isinstance(value, (ShardValues, ShardWeight)):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [shard for one in value for shard in _guarded_in(one)] if isinstance(value, (list, tuple)) else []


def _gathered(value: Any) -> Any:
    """Return arguments with full tables in the place of shards."""
    if isinstance(value, dict):
        return {key: _gathered(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_gathered(one) for one in value)
    if not isinstance(value, (ShardValues, ShardWeight)):
        return value
    if value.of.gathering is None or value.of.what != "weight":
        raise value.of.refusal("together with a gathered weight")
    return value.of.gathering.full(value)


def _local(value: Any, of: ShardOf) -> Any:
    """Return arguments in which tensors that fit the table are narrowed to the shard."""
    if isinstance(value, dict):
        return {key: _local(one, of) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_local(one, of) for one in value)
    if isinstance(value, (ShardValues, ShardWeight)):
        if (value.of.table, value.of.row, value.of.column) != (of.table, of.row, of.column):
            raise of.refusal(f"an operation with '{value.of.table}'")
        return value
    if not isinstance(value, Tensor) or value.numel() == 1:
        return value
    try:
        return of.of_full(torch.broadcast_to(value, of.shape))
    except RuntimeError:
        raise of.refusal(f"an operation with a tensor of shape {tuple(value.shape)}") from None


def _wrap(value: Any, of: ShardOf) -> Any:
    """Return values that were computed element by element as guarded ones."""
    if isinstance(value, (list, tuple)):
        return type(value)(_wrap(one, of) for one in value)
    if not isinstance(value, Tensor) or isinstance(value, (ShardWeight, ShardValues)):
        return value
    if value.is_sparse:  # torch makes no subclass of sparse tensors
        values: Any = value
        values.__class__ = ShardValues
    else:
        values = value.as_subclass(ShardValues)
    values.of = of
    return values
