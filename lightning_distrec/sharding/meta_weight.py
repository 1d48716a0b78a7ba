"""Weights of tables without rows: what is written to all of them is repeated block by block.

A constructor may write to a weight (nn.init, `weight.data.uniform_()`, `weight[0] = 0`) before a
plan assigns its rows to ranks. On the meta device that would be lost. Writes of numbers to the
weight, or to one row of it, are recorded, and each rank repeats them for its own rows. Anything
else (several rows, another tensor, a norm, a copy of the weight) gives the weight all of its rows
at once, as without this package.
"""

import copy
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from warnings import warn

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_distrec._compat.tensors import (
    makes_parameter,
    makes_state_in_backward,
    returns_view,
    storage_key,
    truncated_draw,
    watch_operations,
    written_by,
)
from lightning_distrec._compat.torch import (
    IN_BACKWARD,
    apply_in_backward,
    drop_in_backward_hooks,
    in_backward_optimizers,
)
from lightning_distrec.errors import ShardingError
from lightning_distrec.host_memory import free_bytes
from lightning_distrec.sharding.weight_writes import TRUNCATED, Draw, NeedsRows, Record, Write
from lightning_distrec.sharding.weights.shard_access import Operation, without_guard
from lightning_distrec.sharding.weights.shard_operations import tensors_in, words
from lightning_distrec.sharding.weights.shard_weight import DESCRIBES, SHAPES, VALUES
from lightning_distrec.units import format_bytes

NEED_ROWS = words("""
    register_hook register_post_accumulate_grad_hook share_memory_ __deepcopy__ __reduce_ex__
    untyped_storage storage data_ptr
""")
"""Methods that are for a weight that is not sharded, or give its memory away."""
CREATES = words("""
    new_tensor new_empty new_zeros new_ones new_full empty_like zeros_like ones_like full_like
    randn_like rand_like
""")
"""What makes another tensor and reads no values."""
DESCRIBING = (DESCRIBES | SHAPES) - NEED_ROWS - {"new_tensor"}


def _guarded(_: type, func: Operation, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    kwargs = kwargs or {}
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        attribute = func.__self__.__name__  # type: ignore[attr-defined]
        if attribute in ("device", "is_meta"):
            # The frame gets no name here: it would keep itself alive, with its arguments.
            return _described(attribute, args[0], _caller(inspect.currentframe()))
        if attribute == "grad_fn" and isinstance(args[0], MetaValues):
            return args[0].node()
        if name == "__get__":
            reads = attribute in VALUES - {"grad"}
            name = attribute
        else:
            reads = attribute == "data"
            name = f"{attribute} ="
    else:
        reads = name not in DESCRIBING
    if not reads:
        with without_guard():
            return func(*args, **kwargs)
    weights: list[Any] = list(filter(_is_guarded, tensors_in([args, kwargs])))
    for weight in weights:
        if weight.record.is_over:
            raise ShardingError(
                f"'{name}' was called on a view of {weight.record.description} from before it was "
                "sharded, which has no values. Take another one: by "
                "trainer.strategy.full_parameter(), or of the weight in the module."
            )
    if name == "equal":  # Lightning looks a parameter up in param groups so
        return args[0] is args[1]
    if name == "detach" and makes_parameter(_caller(inspect.currentframe())):
        return _parameter_of(args[0])
    if name == "data =" and isinstance(args[0], MetaWeight) and not _is_guarded(args[1]):
        give_rows(args[0], args[1])
        return None
    if name in CREATES:
        # The state of an optimizer in backward is made by the shards, as the rows are.
        on_meta = makes_state_in_backward(_caller(inspect.currentframe()))
        device = "meta" if on_meta else weights[0].record.device
        with without_guard():
            return func(*args, **{"device": device} | kwargs)
    if name == "__setitem__" and isinstance(args[2], (bool, int, float)):
        # torch would make one on meta
        args = (*args[:2], torch.tensor(args[2], dtype=args[0].dtype))
    # A view of a weight that has its rows by now has been made before.
    if name not in NEED_ROWS and all(weight.record.rows is None for weight in weights):
        # Outside of `except`, in which the frames of the error would hold views of the weight.
        with suppress(NeedsRows):
            return _recorded(func, args, kwargs, weights)
    for weight in weights:
        _give_rows_for(weight, name)
    with without_guard():
        args, kwargs = apply_to_collection([args, kwargs], MetaValues, _rows_of, allow_frozen=True)
        return func(*args, **kwargs)


def _is_guarded(value: Any) -> bool:
    return isinstance(value, (MetaWeight, MetaValues))


def _rows_of(view: Any) -> Tensor:
    record: Record = view.record
    return record.view(view)


def _caller(frame: Any) -> Any:
    return None if frame is None else frame.f_back


def _parameter_of(values: Any) -> nn.Parameter:
    """Return what nn.Parameter makes of a weight or a view of it: another parameter with the memory
    of its rows."""
    _give_rows_for(values, "nn.Parameter")
    if isinstance(values, MetaValues):
        rows = values.record.view(values)
        # Nn.Parameter compares the classes.
        values.__class__ = nn.Parameter  # type: ignore[assignment]
        return nn.Parameter(rows, False)
    with without_guard():
        return nn.Parameter(values.detach(), False)


def _described(name: str, weight: Any, frame: Any) -> Any:
    """Return the device of the rows that a weight will have, and that they are not on meta."""
    record: Record = weight.record
    if name == "device":
        return record.device
    # torch draws nothing on meta, and otherwise again and again what is out of bounds, which is
    # element by element.
    options = truncated_draw(frame) if record.rows is None else None
    if options is None:
        return False
    with suppress(NeedsRows):
        with without_guard():
            row = record.row_of(weight)
        record.append(Write(TRUNCATED, row, (), options))
        return True
    _give_rows_for(weight, TRUNCATED)
    return False


class MetaValues(Tensor):
    """A view of a weight that has no rows yet."""

    record: Record
    weight: "MetaWeight"
    is_traced: bool
    """Whether autograd traces it to the weight."""
    __torch_function__: Any = classmethod(_guarded)

    def node(self) -> Any:
        """Return a node of autograd's that leads to the weight's, on which optimizers in backward
        hang their hooks."""
        with without_guard():
            return self.weight.view_as(self.weight).grad_fn if self.is_traced else None


class MetaWeight(nn.Parameter):
    """The weight of a table that has no rows yet."""

    record: Record
    __torch_function__: Any = classmethod(_guarded)

    # These two ask no __torch_function__.
    def __deepcopy__(self, memo: Any) -> Any:
        _give_rows_for(self, "deepcopy")  # a copy on the meta device would draw other rows
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (self.record, self.dtype, self.requires_grad)


def record_writes(weight: Any, draw: Draw, description: str) -> Record:
    """Record from now on what is written to a weight on the meta device, in place."""
    device = torch.get_default_device()
    device = torch.device("cpu") if device.type == "meta" else device
    # By its class: the module tree and the user's code hold references to this object. The class
    # adds methods only.
    weight.record = record = Record(tuple(weight.shape), draw, description, device)
    weight.__class__ = MetaWeight
    return record


def carry_record(weight: Any, resized: Any) -> None:
    """Give a weight of another number of rows what was written to `weight`.

    Raises ShardingError: it was written to one row.
    """
    if isinstance(weight, MetaWeight):
        resized.record = weight.record.resized(len(resized))
        resized.__class__ = MetaWeight


def stop_recording(weight: Any) -> None:
    """Turn a weight into an ordinary one, which keeps its record."""
    if isinstance(weight, MetaWeight):
        weight.record.is_over = True
        weight.__class__ = nn.Parameter  # type: ignore[assignment]


def initial_rows(weight: Any, init_fn: Draw | None) -> Callable[..., Any]:
    """Return what gives a block of rows their values: of (rows, number of the first), and a
    generator if one draws."""
    record = getattr(weight, "record", None)
    if record is not None:
        return record.fill  # type: ignore[no-any-return]
    assert init_fn is not None
    return lambda values, _, **options: init_fn(values, **options)


def written_digest(weight: Any) -> str:
    """Return what differs between ranks that wrote other values to a weight without rows; "" for
    one with rows."""
    record = getattr(weight, "record", None)
    return "" if record is None else record.digest()


def give_rows_to_buffers(root: nn.Module) -> None:
    """Give all of its rows to each weight of which a buffer below `root` is a view."""
    for path, buffer in list(root.named_buffers(remove_duplicate=False)):
        if isinstance(buffer, MetaValues):
            parent, _, name = path.rpartition(".")
            _give_rows_for(buffer, f"buffer {path}")
            setattr(root.get_submodule(parent), name, buffer.record.view(buffer))


def can_have_rows(weight: Any) -> bool:
    """Return whether a weight has no rows yet, and may be given all of them."""
    return isinstance(weight, MetaWeight)


def give_rows(weight: Any, rows: Tensor | None = None) -> None:
    """Give a weight that is not sharded all of its rows, drawn or `rows`. Raises ShardingError: it
    cannot have them."""
    record: Record = weight.record
    if rows is None:
        num_bytes = record.shape[0] * record.shape[1] * weight.dtype.itemsize
        free = free_bytes()
        if num_bytes > free and record.device.type == "cpu":
            raise ShardingError(
                f"{record.description} needs {format_bytes(num_bytes)} for all of its rows on "
                f"every rank, and {format_bytes(free)} are free. It is sharded where it is not "
                "replicated, tied, or read."
            )
        with without_guard(), torch.no_grad():
            rows = torch.empty(record.shape, dtype=weight.dtype, device=record.device)
            record.fill(rows, 0)
    weight.record.rows = rows
    in_backward = in_backward_optimizers(weight)
    drop_in_backward_hooks(weight)  # they hold the weight
    with without_guard():
        real = nn.Parameter(rows, weight.requires_grad)
        left_behind = {"record", *IN_BACKWARD}
        real.__dict__.update({
            key: value for key, value in weight.__dict__.items() if key not in left_behind
        })
        try:
            torch.utils.swap_tensors(weight, real)
        except RuntimeError as error:
            raise ShardingError(
                f"{record.description} is not sharded, and cannot get its rows now: {error}. Build "
                "it with device='cpu', or outside of configure_model and meta_tables()."
            ) from error
    apply_in_backward(in_backward, weight)


def _give_rows_for(weight: Any, name: str) -> None:
    if not _is_guarded(weight) or weight.record.rows is not None:
        return
    record: Record = weight.record
    warn(
        f"{record.description} is built whole on every rank: '{name}' needs all of its rows. What "
        "nn.init draws, and numbers that are written to all of it or to one row, each rank writes "
        "to its own rows.",
        stacklevel=4,
    )
    give_rows(_weight_of(weight))


def _weight_of(weight: Any) -> Any:
    return weight if isinstance(weight, MetaWeight) else weight.weight


def _recorded(func: Operation, args: Any, kwargs: Any, weights: list[Any]) -> Any:
    """Run an operation without values; record what it writes into the weights. Raises NeedsRows: it
    reads values."""
    with without_guard():
        sources = {storage_key(weight): weight for weight in weights}
    writes: list[tuple[Record, Write]] = []

    def check(operation: Any, op_args: tuple[Any, ...], op_kwargs: Any) -> None:
        tensors = tensors_in([op_args, op_kwargs])
        touched = [tensor for tensor in tensors if storage_key(tensor) in sources]
        written = list(written_by(operation, op_args, op_kwargs))
        if not touched or (not written and returns_view(operation)):
            return
        only_written = len(touched) == len(written) == 1 and touched[0] is written[0]
        if not only_written or op_args[0] is not touched[0]:
            raise NeedsRows
        record: Record = sources[storage_key(touched[0])].record
        writes.append((record, record.write_of(operation, op_args, op_kwargs)))

    try:
        with without_guard(), watch_operations(lambda *_: None, check):
            result = func(*args, **kwargs)
    except (RuntimeError, TypeError) as error:
        if "meta" not in str(error):
            raise
        # with rows it may be right: it wants tensors of one device, or memory
        raise NeedsRows from None
    for record, write in writes:
        record.append(write)

    def wrap(tensor: Tensor) -> Tensor:
        source = sources.get(storage_key(tensor))
        if source is None or _is_guarded(tensor):
            return tensor
        # a view with a base would keep the weight from its rows
        view: Any = tensor.detach().as_subclass(MetaValues)
        view.record = source.record
        view.weight = _weight_of(source)
        view.is_traced = tensor.requires_grad
        return view

    with without_guard():
        return apply_to_collection(result, Tensor, wrap)


def _rebuilt(record: Record, dtype: torch.dtype, requires_grad: bool) -> nn.Parameter:
    weight: Any = nn.Parameter(torch.empty(record.shape, dtype=dtype, device="meta"), requires_grad)
    weight.record = record
    weight.__class__ = MetaWeight
    return weight  # type: ignore[no-any-return]
