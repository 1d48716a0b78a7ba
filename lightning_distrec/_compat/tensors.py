"""Private names of torch's sparse and sharded tensors, of its dispatcher and of what sends: both
are watched."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_distrec._compat.patches import Patches
from lightning_distrec._compat.torch import without_torch_function

Note = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]


def rows_and_values(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return row numbers and values of a table's sparse gradient, in which rows may occur more than
    once."""
    # The public methods refuse uncoalesced gradients, and coalescing sorts them.
    return gradient._indices()[0], gradient._values()


def mark_coalesced(gradient: torch.Tensor, num_rows: int) -> None:
    """Mark a sparse gradient as coalesced if it has just `num_rows` entries."""
    # Accumulating a sparse gradient forgets that it is coalesced, and who needs it so sorts it
    # again, for which the host waits for a GPU. Source:
    # torch/csrc/autograd/functions/accumulate_grad.h.
    if gradient.is_sparse and gradient._nnz() == num_rows:
        gradient._coalesced_(True)


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the dense tensors that hold a tensor's memory, which alone can be recorded on a
    stream."""
    # The public methods of a sparse tensor refuse one that is not coalesced.
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    if tensor.layout == torch.jagged:
        return tensor.values(), tensor.offsets()  # type: ignore[attr-defined]
    return (tensor.values(),) if tensor.is_nested else (tensor,)


def local_offsets(tensor: Any) -> tuple[int, ...]:
    """Return the offsets of this rank's local tensor within a DTensor, one per dim."""
    return tuple(
        compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[
            1
        ]
    )


def is_first_replica(tensor: Any) -> bool:
    """Return whether a ShardedTensor is of the group of ranks with rank 0; others have replicas of
    its shards."""
    # Source: torch/distributed/_shard/sharded_tensor/api.py.
    return 0 in torch.distributed.get_process_group_ranks(tensor._process_group)


def watch_operations(
    note: Note, check: Callable[..., None] | None = None
) -> AbstractContextManager[Any]:
    """Call `note` after each operation that torch dispatches inside of the context, below autograd
    and autocast.

    note: gets the operation, its arguments, and what it returned; what it runs itself is not
    watched. check: gets the operation and its arguments before it runs.
    """
    return _Watch(note, check)


class _Watch(TorchDispatchMode):
    # At the top of the file: a class is in a reference cycle, and one of each call would keep its
    # arguments.
    supports_higher_order_operators = True

    def __init__(self, note: Note, check: Callable[..., None] | None) -> None:
        super().__init__()
        self._note = note
        self._check = check

    # What torch.compile has compiled runs without it: a mode that does not ignore compile's
    # internals makes torch give up for good on any function that is first called inside of it.
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():  # it comes before dispatch
            if self._check is not None:
                self._check(func, args, kwargs or {})
            output = func(*args, **(kwargs or {}))
            self._note(func, args, kwargs or {}, output)
            return output


def watch_sends(on_send: Callable[[Tensor, int, str], None]) -> Patches:
    """Call `on_send` for each point-to-point send that is made as a P2POp of torch.distributed.

    on_send: gets the tensor, the global rank that it goes to, and the name of the function that
    makes the P2POp, which reads it from torch.distributed, as torch.distributed.pipelining does.
    `isend` itself cannot be watched: P2POp takes no other function in its place. Source:
    torch/distributed/pipelining/stage.py, get_fwd_send_ops.
    """
    original: Any = dist.P2POp

    class Watched(original):  # type: ignore[misc]
        def __init__(self, op: Any, *args: Any, **options: Any) -> None:
            super().__init__(op, *args, **options)
            if op is dist.isend:
                frame = inspect.currentframe()
                caller = (
                    "" if frame is None or frame.f_back is None else frame.f_back.f_code.co_name
                )
                del frame  # it would keep itself alive
                on_send(self.tensor, self.peer, caller)

    patches = Patches()
    patches.replace(dist, "P2POp", Watched)
    return patches


def argument_names(operation: Any) -> list[str]:
    """Return the names of the arguments of an operation, in their order. Source: torch/_ops.py,
    OpOverload._schema."""
    return [argument.name for argument in operation._schema.arguments]


def written_by(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operation writes to in place. Source: torch/_ops.py,
    OpOverload._schema."""
    schema = operation._schema
    if not schema.is_mutable:
        return
    values = {
        argument.name: value for argument, value in zip(schema.arguments, args, strict=False)
    } | kwargs
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield values.get(argument.name)


def truncated_draw(frame: Any) -> dict[str, Any] | None:
    """Return the options with which torch's trunc_normal_ asks in this frame whether its tensor is
    on meta."""
    # It is no torch function, and so cannot be seen itself. Source: torch/nn/init.py,
    # _no_grad_trunc_normal_.
    frame = _without_modes(frame)
    if frame is None or frame.f_code is not torch.nn.init._no_grad_trunc_normal_.__code__:
        return None
    if frame.f_locals["generator"] is not None:
        return None
    return {name: frame.f_locals[name] for name in ("mean", "std", "a", "b")}


def makes_parameter(frame: Any) -> bool:
    """Return whether nn.Parameter makes one of a tensor of another class in this frame: by
    `detach`."""
    # It is no torch function either, and takes the class that `detach` returns. Source:
    # torch/nn/parameter.py.
    frame = _without_modes(frame)
    return frame is not None and frame.f_code is nn.Parameter.__new__.__code__


def makes_state_in_backward(frame: Any) -> bool:
    """Return whether `apply_optimizer_in_backward` constructs an optimizer in this frame, by the
    class that it has."""
    # Others are not known by their weight, and could not be made again with the weight's rows.
    frame = _without_modes(frame)
    caller = None if frame is None else frame.f_back
    upstream = "torch.distributed.optim.apply_optimizer_in_backward"
    return caller is not None and caller.f_globals["__name__"] == upstream


def _without_modes(frame: Any) -> Any:
    # modes, such as torch.device()
    while frame is not None and frame.f_code.co_name == "__torch_function__":
        frame = frame.f_back
    return frame


def returns_view(operation: Any) -> bool:
    """Return whether an operation returns views of its arguments only. Source: torch/_ops.py,
    OpOverload._schema."""
    return all(returned.alias_info is not None for returned in operation._schema.returns)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was written to in place. Source: torch/csrc/autograd/variable.h,
    VariableVersion."""
    return tensor._version


def storage_key(tensor: Tensor) -> int:
    """Return what identifies a tensor's storage while that lives. Source: torch/storage.py."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


def replace_calls(module: nn.Module, call: Callable[..., Any]) -> Patches:
    """Let calls of a module go to `call`, past its forward and its hooks."""
    # Source: torch/nn/modules/module.py, `_wrapped_call_impl`, by which nn.Module.compile does the
    # same.
    patches = Patches()
    patches.replace(module, "_compiled_call_impl", call)
    return patches
