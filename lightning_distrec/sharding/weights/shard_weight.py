"""The parameters that a module shows of a sharded table: this rank's shard, guarded against being
taken for the table.

Who holds the object decides, not who calls: modules and optimizers hold guarded weights, our rooms
the plain shards (`LocalShard.values`), and what of theirs needs values of a guarded weight says so:
`without_guard`.

User code sees the table's shape. Elementwise operations (averages, clamps, decay) are exact on
shards and run on them (shard_operations.py). Sums, norms and extremes run over all ranks. Random
draws, also in torch.nn.init, run for the full table on every rank, which keeps its shard: rows of
ranks differ, and generators have drawn what they draw in one process. What a step computes of a
table with gathered_weight=True is computed of the full table, as in one process
(collective_reads.py). Everything else that needs values is refused, naming the table.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_distrec import gpu
from lightning_distrec._compat.torch import use_foreach_for
from lightning_distrec.errors import ShardedWeightError
from lightning_distrec.host_memory import free_host_bytes
from lightning_distrec.sharding.weights.collective_reads import call_on_full
from lightning_distrec.sharding.weights.shard_access import (
    HOOKED,
    GuardedTable,
    Operation,
    ShardPlace,
    refuse_leaf,
    rewriting,
    without_guard,
    write_back,
)
from lightning_distrec.sharding.weights.shard_operations import (
    compute,
    first_of,
    is_elementwise,
    is_guarded,
    is_in_place,
    is_reduction,
    reduce_over_ranks,
    tensors_in,
    words,
    write_rows,
)
from lightning_distrec.units import format_bytes

INIT = "torch.nn.init"
VALUES = frozenset({"data", "grad", "T", "mT", "H", "mH", "real", "imag", "data =", "grad ="})
"""Attributes with values; the others describe a tensor."""
SHAPES = words("shape ndim size dim ndimension numel nelement nbytes __len__")
DESCRIBES = words("""
    __hash__ __repr__ __format__ stride storage_offset is_contiguous is_floating_point is_complex
    element_size is_inference untyped_storage get_device requires_grad_ retain_grad
    register_post_accumulate_grad_hook type share_memory_ __deepcopy__ new_tensor is_pinned
    _has_compatible_shallow_copy_type backward
""")
"""Methods that read no values, or that copy and print all that this rank has."""
DRAWS = words("normal_ uniform_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_")
DRAWS_LIKE = words("randn_like rand_like randint_like")
ALIASES = frozenset({"detach"})
"""Operations whose result is the weight itself, which user code may write to."""
READ_GRADIENT: Any = Tensor.grad.__get__  # type: ignore[union-attr]


def _guarded(_: type, func: Operation, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    # `==`, not `is`: each read of `Tensor.grad.__get__` makes another method wrapper.
    if func == READ_GRADIENT:  # zero_grad asks each weight at each step, and most have none
        with without_guard():
            if args[0].grad is None and not args[0].place.table.state.reached:
                return None
    name = func.__name__
    if name == "register_hook":
        return _register_hook(*args)
    is_attribute = False
    if name in ("__get__", "__set__", "__delete__"):
        is_attribute = True
        attribute = func.__self__.__name__  # type: ignore[attr-defined]
        is_read = name == "__get__"
        name = attribute if is_read else "setting"
        if not is_read and attribute in ("data", "grad"):
            name = f"{attribute} ="
    reads_values = name in VALUES | SHAPES if is_attribute else name not in DESCRIBES
    if not reads_values:
        with without_guard():
            return func(*args, **kwargs)
    if name in SHAPES:
        return func(first_of(args).place.meta(), *args[1:], **kwargs)
    if is_attribute:
        write_back()
        return _attribute(func, name, args)
    if is_in_place(name) or name == "__setitem__":
        with rewriting():
            return _in_user_code(func, name, args, kwargs)
    write_back()
    return _in_user_code(func, name, args, kwargs)


class ShardValues(Tensor):
    """Values of a shard, element by element: of its weight, of its gradient, or computed from
    them."""

    place: ShardPlace
    __torch_function__: Any = classmethod(_guarded)


class ShardWeight(nn.Parameter):
    """The weight of a shard, (num_rows, num_columns) of this rank."""

    place: ShardPlace
    __torch_function__: Any = classmethod(_guarded)


# torch's optimizers take their foreach path for types that they list, by exact type.
use_foreach_for(ShardWeight)


def guard(table: GuardedTable, places: list[tuple[int, int]]) -> None:
    """Turn this rank's shards of a table into guarded ones, in place. places: first row and column
    of each."""
    for weight, (row, column) in zip(table.weights, places, strict=True):
        rows, columns = weight.shape
        # By its class: kernels, optimizers and the module tree hold references to this object. The
        # class adds methods only, so that the object's memory layout fits.
        weight.__class__ = ShardWeight
        weight.place = ShardPlace(table, row, column, rows, columns)


def is_elementwise_optimizer(optimizer: Any) -> bool:
    """Whether an optimizer's step is torch's or torchrec's, which were tried over shards."""
    # Others are user code: a norm of theirs (SAM, LAMB) is over all ranks, and what is inexact on
    # shards is refused.
    return type(optimizer).step.__module__.startswith(("torch.", "torchrec."))


def guard_state(optimizer: Optimizer) -> None:
    """Let loaded state of an optimizer of the user's be values of shards, as its own code makes
    it."""
    if is_elementwise_optimizer(optimizer):
        return
    with without_guard():
        for parameter, state in optimizer.state.items():
            if isinstance(parameter, ShardWeight):
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.shape == parameter.shape:
                        state[key] = _wrap(value, parameter.place, is_computed=True)


def _attribute(func: Operation, name: str, args: Any) -> Any:
    shard = args[0]
    place = args[0].place
    if name in ("data =", "grad ="):
        with rewriting():
            return _assign(shard, name, *args[1:])
    if name in ("data", "grad"):
        with without_guard():
            # torch's copy of a sparse gradient would not share what is written to it.
            value = shard if name == "data" and shard.is_sparse else func(shard)
            if (
                value is None
                and place.table.name in place.table.state.reached
                and isinstance(shard, ShardWeight)
            ):
                value = torch.zeros_like(shard.detach())  # without rows; others have some
            return _wrap(value, place if name == "data" else replace(place, kind="gradient"))
    return _on_full(func, name, args, {}, place)


def _register_hook(weight: Any, hook: Callable[[Any], Any]) -> Any:
    """Show a hook values of a shard, and take plain ones, as the optimizers do."""
    # Ranks without rows of the table call no hook, so that it must not reduce over ranks.
    place = replace(weight.place, kind=HOOKED)

    def call_with_values(gradient: Tensor) -> Any:
        result = hook(_wrap(gradient, place))
        return result if result is None or result.is_sparse else result.as_subclass(Tensor)

    with without_guard():
        return weight.register_hook(call_with_values)


def _assign(shard: Any, name: str, value: Any = None) -> None:
    """Set the shard's data or gradient to values of a shard, or to its part of a full tensor."""
    place: ShardPlace = shard.place
    with without_guard():
        if name == "grad =":
            place.table.state.reached.discard(place.table.name)
            gradient = None if value is None else _part(value, place, "grad =")
            if gradient is not None and not gradient.is_sparse:
                gradient = gradient.as_subclass(Tensor)  # plain, as the optimizers take gradients
            shard.grad = gradient
            return
        if shard.dtype != value.dtype or shard.device != value.device:
            raise place.refusal("data =")
        # Else a module is moved to the device where it is.
        if shard.data_ptr() != value.data_ptr() or shard.shape != value.shape:
            _note_write(place)
            shard.detach().copy_(_part(value, place, "data ="))


def _part(value: Any, place: ShardPlace, name: str) -> Tensor:
    if hasattr(value, "place"):
        place.refuse_unlike(value.place)
        return value  # type: ignore[no-any-return]
    if value.shape == place.table.shape:
        return place.narrow(value).clone()
    raise place.refusal(f"{name} a tensor of shape {tuple(value.shape)}")


def _note_write(place: ShardPlace) -> None:
    place.note_write()
    # A full weight that was gathered before is stale from here on.
    place.table.state.num_changes += 1


def _in_user_code(func: Operation, name: str, args: Any, kwargs: Any) -> Any:
    shard = _shards_in([args, kwargs])[0]
    place: ShardPlace = shard.place
    if name == "__reduce_ex__":
        raise place.refusal("to pickle it, which full_parameter and full_state_dict() are for")
    # normal_, constant_ and others hand themselves over
    if getattr(func, "__module__", "") == INIT:
        full = _full_like(shard)
        func(**kwargs | {"tensor": full})
        with torch.no_grad():
            return _fill(shard, full)
    if name in DRAWS and shard is args[0]:
        if place.kind != "weight":
            raise place.refusal(name)
        full = _full_like(shard)
        func(full, *args[1:], **kwargs)
        return _fill(shard, full)
    if name in DRAWS_LIKE:
        if not place.table.has_single_shards:
            raise place.refusal(name)
        return _wrap(
            place.narrow(func(_full_like(args[0]), *args[1:], **kwargs)), place, is_computed=True
        )
    # Lightning looks a parameter up in param groups so; shards of two tables may be alike
    if name == "equal":
        return _same_place(*args)
    reduces = place.kind != HOOKED and is_reduction(place, name, args, kwargs)
    if reduces and place.table.state.reaches_all_ranks():
        return reduce_over_ranks(name, args, kwargs)
    if is_elementwise(name, args) and not _takes_full(name, args, kwargs, place):
        return _on_elements(func, name, args, kwargs, place)
    if name == "__setitem__" and is_guarded(args[0]) and place.table.gathering is None:
        _note_write(place)
        with without_guard():
            return write_rows(*args)
    return _on_full(func, name, args, kwargs, place)


def _on_elements(func: Operation, name: str, args: Any, kwargs: Any, place: ShardPlace) -> Any:
    # of several tables, and of layers among them
    if name.startswith("_foreach_") and len(args[0]) > 1:
        return _on_lists(func, name, args, kwargs)
    if is_in_place(name):
        if not is_guarded(first_of(args)):
            raise place.refusal(f"{name} into a tensor that is none of its shards")
        _note_write(place)
    with without_guard():
        if name in ALIASES and first_of(args).is_sparse:
            return args[0]
        return _wrap(compute(func, args, kwargs, place), place, is_computed=name not in ALIASES)


def _on_lists(func: Operation, name: str, args: Any, kwargs: Any) -> list[Any] | None:
    results = []
    for number in range(len(args[0])):
        single = [[arg[number]] if isinstance(arg, (list, tuple)) else arg for arg in args]
        shards = _shards_in(single)
        results.append(
            _on_elements(func, name, single, kwargs, shards[0].place)
            if shards
            else func(*single, **kwargs)
        )
    return None if results[0] is None else [result[0] for result in results]


def _takes_full(name: str, args: Any, kwargs: Any, place: ShardPlace) -> bool:
    """Whether an operation takes the full weight although it is exact on shards: where ranks may
    mix it with their own.

    A step may mix the result with what is different on every rank, as its batch, so that shards of
    it fit no more.
    """
    if place.table.gathering is None or place.kind != "weight" or name in ALIASES:
        return False
    if is_in_place(name):
        return not is_guarded(first_of(args))
    if place.table.state.in_step:
        return True
    return torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in tensors_in([args, kwargs])
    )


def _on_full(func: Operation, name: str, args: Any, kwargs: Any, place: ShardPlace) -> Any:
    if place.kind == "weight" and place.table.gathering is not None:
        return call_on_full(func, args, kwargs)
    result = NotImplemented
    if place.table.state.in_step and place.kind == "weight" and not place.is_computed:
        weight = place.table.weights[0]
        is_detached = any(not shard.requires_grad for shard in _shards_in([args, kwargs]))
        if not (is_detached and weight.requires_grad and torch.is_grad_enabled()):
            result = place.table.score(func, name, args, kwargs, place.table)
    if result is NotImplemented:
        raise place.refusal(name)
    return result


def _same_place(*tensors: Any) -> bool:
    """Return torch.equal of two tensors, of which one is a shard's: False where they are of
    different shards."""
    if len({tensor.place.key if hasattr(tensor, "place") else None for tensor in tensors}) > 1:
        return False
    with without_guard():
        return torch.equal(*tensors)


def _shards_in(value: Any) -> list[Any]:
    return list(filter(is_guarded, tensors_in(value)))


def _wrap(result: Any, place: ShardPlace, is_computed: bool = False) -> Any:
    """Return values that were computed element by element as guarded ones."""
    if is_computed and not place.is_computed:
        place = replace(place, is_computed=True)

    def wrap(value: Any) -> Any:
        if isinstance(value, (ShardWeight, ShardValues)):
            return value
        values: Any = value if value.is_sparse else value.as_subclass(ShardValues)
        values.__class__ = ShardValues  # torch makes no subclass of sparse tensors
        values.place = place
        return values

    return apply_to_collection(result, Tensor, wrap)


def _full_like(shard: Any) -> Tensor:
    """Return an empty tensor of the table's shape. Raises ShardedWeightError: there is no memory
    for it."""
    shape = shard.place.meta().shape
    with without_guard():
        device = shard.device
        dtype = shard.dtype
    # Checked before: on the host, Linux kills a process that takes too much, without an error.
    num_bytes = shape.numel() * dtype.itemsize
    free = free_host_bytes() if device.type == "cpu" else gpu.free_bytes(device)
    if num_bytes > free:
        raise ShardedWeightError(
            f"table '{shard.place.table.name}': to draw its weight takes {format_bytes(num_bytes)} "
            f"on every rank, and {format_bytes(free)} are free. Build it in configure_model: each "
            "rank draws its rows by the init_fn."
        )
    return torch.empty(shape, dtype=dtype, device=device)


def _fill(shard: Any, full: Tensor) -> Any:
    """Copy this rank's rectangles of a full table into `shard`, or into all of its shards where
    there are several."""
    place: ShardPlace = shard.place
    with without_guard():
        refuse_leaf(shard)  # no_grad below would hide it
        if not place.stands_for_table:
            return shard
        targets = [shard]
        if not place.table.has_single_shards:
            targets = list(place.table.weights)
            if shard.data_ptr() != targets[0].data_ptr():
                raise place.refusal("a random draw into a copy")
        place.note_write()
        for target in targets:
            with torch.no_grad():
                target.detach().copy_(target.place.narrow(full))
    return shard
