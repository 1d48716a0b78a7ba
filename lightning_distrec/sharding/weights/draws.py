"""Random draws into shards, and torch.nn.init on them: done for the full table on every rank, which keeps its shard.

So fans are those of the table, rows of different ranks differ, and generators have drawn what they draw in one process.
"""

import inspect
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from lightning_distrec.errors import ShardedWeightError
from lightning_distrec.host_memory import free_host_bytes
from lightning_distrec.sharding.weights.elementwise import is_elementwise, words
from lightning_distrec.sharding.weights.shard_of import ShardOf, without_guard
from lightning_distrec.units import format_bytes

INIT = "torch.nn.init"
DRAWS = words("normal_ uniform_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_")
DRAWS_LIKE = frozenset({"randn_like", "rand_like", "randint_like"})


def draw(func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return args[0], a shard, after a draw in place by `func`, a method of Tensor."""
    target = args[0]
    of: ShardOf = target.of
    if of.what != "weight":
        raise of.refusal(name)
    full = _full_like(target)
    func(full, *args[1:], **kwargs)
    _keep(target, full)
    return target


def draw_like(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Return the shard of what `func` (torch.randn_like, for one) draws for the full table."""
    of: ShardOf = args[0].of
    if not of.alone:
        raise of.refusal(func.__name__)
    return of.of_full(func(_full_like(args[0]), *args[1:], **kwargs))


def initialize(func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Do one step of a function of torch.nn.init, which sees the full table's values of its call so far."""
    target: Any = kwargs.get("tensor", args[0] if args else None)
    if getattr(func, "__module__", "") == INIT:  # normal_, constant_ and others hand themselves over
        full = _full_like(target)
        func(**kwargs | {"tensor": full})
        with torch.no_grad():
            _keep(target, full)
        return target
    full, shard = _full_of_call(args, kwargs)
    writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    if not (writes or is_elementwise(name) or name in DRAWS_LIKE):
        raise shard.of.refusal(f"{name} in torch.nn.init")
    result = func(
        *[full if value is shard else value for value in args],
        **{key: full if value is shard else value for key, value in kwargs.items()},
    )
    if not writes or target is not shard:
        return result
    _keep(shard, full)
    return shard


_calls: list[tuple[FrameType, Tensor, Any]] = []
"""The call of torch.nn.init in progress, or the last one: its frame, the full values, the shard."""


def forget_last_call() -> None:
    """Free the values that the last call of torch.nn.init has made."""
    _calls.clear()


def _full_of_call(args: Any, kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
    """Return the full values that the call of torch.nn.init in progress has made so far, and the shard it is for."""
    frame: Any = inspect.currentframe()
    while frame.f_globals.get("__name__") != INIT:
        frame = frame.f_back
    target = next(value for value in [*args, *kwargs.values()] if hasattr(value, "of"))
    if not _calls or _calls[0][0] is not frame or _calls[0][2] is not target:
        _calls[:] = [(frame, _full_like(target), target)]
    return _calls[0][1], target


def _full_like(target: Any) -> Tensor:
    """Return a tensor of the table's shape, without values; an empty one for shards that are filled with the first.

    Raises ShardedWeightError: there is no memory for it.
    """
    of: ShardOf = target.of
    shape = of.meta().shape
    with without_guard():
        device, dtype = target.device, target.dtype
    needed = shape.numel() * dtype.itemsize
    free = free_host_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if needed > free:
        raise ShardedWeightError(
            f"table '{of.table}': values are drawn for its weight, which takes {format_bytes(needed)} on every rank "
            f"for a moment, and {format_bytes(free)} are free. Build the table in configure_model, where each rank "
            "draws its own rows by the init_fn of the table's config."
        )
    return torch.empty(shape, dtype=dtype, device=device)


def _keep(target: Any, full: Tensor) -> None:
    """Copy this rank's rectangles of a full table into `target`; into all of its shards where there are several."""
    of: ShardOf = target.of
    with without_guard():
        if target.requires_grad and target.is_leaf and torch.is_grad_enabled():
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
        if not of.stands_for_table:
            return
        if not of.alone and target.data_ptr() != of.weights[0].data_ptr():
            raise of.refusal("a random draw into a copy")
        of.note_write()
        for shard in [target] if of.alone else of.weights:
            with torch.no_grad():
                shard.detach().copy_(shard.of.of_full(full))
