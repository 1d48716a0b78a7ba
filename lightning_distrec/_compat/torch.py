"""Private names of torch: autograd, process groups, DistributedDataParallel and modules."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


def share_hooks(original: nn.Module, module: nn.Module) -> None:
    """Give `module` the forward and backward hooks of `original`, those that are registered or removed later too.

    Source: torch/nn/modules/module.py keeps them in dicts, which the handles of `register_...` refer to.
    """
    for name, value in vars(original).items():
        if name.startswith(("_forward", "_backward", "_is_full_backward")):
            module.__dict__[name] = value


def has_gradient_hooks(parameter: nn.Parameter, but: int = 0) -> bool:
    """Whether `register_hook`, or `register_post_accumulate_grad_hook` more than `but` times, was called on it."""
    after: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}  # type: ignore[attr-defined]
    return bool(parameter._backward_hooks) or len(after) > but


def watch_total_norm(check: Callable[[list[torch.Tensor]], None]) -> Callable[[], None]:
    """Call `check` with the gradients whose norm torch.nn.utils.clip_grad_norm_ is about to take; returns an undo.

    Source: torch/nn/utils/clip_grad.py; the function finds `_get_total_norm` among its module's globals.
    """
    from torch.nn.utils import clip_grad

    original = clip_grad._get_total_norm

    def watched(tensors: Any, *args: Any, **options: Any) -> torch.Tensor:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        check(tensors)
        return original(tensors, *args, **options)

    clip_grad._get_total_norm = watched

    def undo() -> None:
        if clip_grad._get_total_norm is watched:
            clip_grad._get_total_norm = original

    return undo


def ignore_in_ddp(module: nn.Module, names: list[str]) -> None:
    """Make a later DistributedDataParallel(module) neither broadcast nor reduce what is called `names`.

    Source: torch/nn/parallel/distributed.py; torchrec's DefaultDataParallelWrapper does the same.
    """
    from torch.nn.parallel import DistributedDataParallel

    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


def broadcast_module_states(module: nn.Module, ignore: list[str]) -> None:
    """Collective. Give every rank rank 0's parameters and buffers, but for those called `ignore`.

    Source: torch/distributed/utils.py; DDPStrategy.setup calls it for evaluation, shards included.
    """
    from torch.distributed.distributed_c10d import _get_default_group
    from torch.distributed.utils import _sync_module_states

    _sync_module_states(module, _get_default_group(), 250 * 2**20, 0, ignore)


def local_offsets(tensor: Any) -> tuple[int, ...]:
    """Return where the rectangle of a DTensor that this rank holds begins in the whole of it.

    Source: torch/distributed/tensor/_utils.py.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])


def is_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor shares another's memory, as autograd knows of it. Source: torch/_tensor.py."""
    return bool(tensor._is_view())


def apply_to_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer of a module by what `function` makes of it, as Module.to does.

    Source: torch/nn/modules/module.py; fully sharded modules keep what they know of their parameters in step.
    """
    module._apply(function)


def default_store() -> Any:
    """Return the store of the default process group. Source: torch/distributed/distributed_c10d.py."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def collective_counts() -> list[int]:
    """Return how many exchanges this process has begun in each of its process groups, the oldest first.

    Source: torch/distributed/distributed_c10d.py; every backend counts its own, for just this comparison of ranks.
    """
    from torch.distributed.distributed_c10d import _world

    groups: list[Any] = list(_world.pg_map)
    return [group._get_sequence_number_for_group() for group in groups]


def pin_memory(batch: Any) -> Any:
    """Return the batch with its tensors in pinned memory. Source: torch/utils/data/_utils/pin_memory.py."""
    from torch.utils.data._utils.pin_memory import pin_memory as pin

    return pin(batch)


def order_backward(outputs: list[torch.Tensor], since: int, first: int) -> int:
    """Let backward run the nodes that were made since `since` and that lead to `outputs` before all others.

    since: what `next_backward_number` said before. first: the first of their new numbers; autograd runs the node of the
    highest number that is ready. Returns how many numbers from `first` on are taken.
    Source: torch/csrc/autograd/python_cpp_function.h, since torch 2.2; engine.cpp, CompareNodeTaskTime.
    """
    nodes: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    taken = 0
    while nodes:
        node = nodes.pop()
        number = node._sequence_nr()
        if since <= number < FIRST_ORDERED:  # neither older nor done
            node._set_sequence_nr(first + number - since)
            taken = max(taken, number - since + 1)
            nodes += [following for following, _ in node.next_functions if following is not None]
    return taken


def saved_tensors_are_hooked() -> bool:
    """Whether what autograd saves is packed by hooks now, as inside of torch.utils.checkpoint(use_reentrant=False).

    Source: torch/csrc/autograd/saved_variable_hooks.h; torch.autograd.graph.saved_tensors_hooks sets them.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def next_backward_number() -> int:
    """Return the number of the node of autograd's graph that is made next on this thread."""
    from torch.autograd import _get_sequence_nr

    return _get_sequence_nr()


FIRST_ORDERED = 2**60
"""Above all numbers that autograd gives by itself, but those of the leaves."""


def version_of(tensor: torch.Tensor) -> int | None:
    """Return the number that every write in place raises; None for tensors of inference mode, which have none."""
    return None if tensor.is_inference() else tensor._version


def register_container(
    kind: type, flatten: Callable[[Any], tuple[list[Any], Any]], unflatten: Callable[[Iterable[Any], Any], Any]
) -> None:
    """Tell torch how to take a container apart; it knows containers by their exact type.

    Source: torch/utils/_pytree.py, which torchrec registers its own containers with.
    """
    from torch.utils._pytree import register_pytree_node

    register_pytree_node(kind, flatten, unflatten)


def in_backward() -> bool:
    """Whether this thread is running a backward. Source: torch/csrc/autograd/python_autograd.cpp."""
    return bool(torch._C._current_graph_task_id() != -1)  # type: ignore[attr-defined]


def watch_collectives(names: tuple[str, ...], told: Callable[[str, dict[str, Any], str], None]) -> Callable[[], None]:
    """Call `told` before each call of torch.distributed's functions of these names; returns an undo.

    told: gets the function's name, its arguments by name, and the module that called it.
    Names that this torch lacks are passed over. Calls are seen that read the function from torch.distributed when they
    make them, as torchrec's and Lightning's do; those of torch's own C++ are not.
    """
    import torch.distributed as dist

    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    watched = {name: _watched_collective(name, original, told) for name, original in originals.items()}
    for name, function in watched.items():
        setattr(dist, name, function)

    def undo() -> None:
        for name, function in watched.items():
            if getattr(dist, name) is function:
                setattr(dist, name, originals[name])

    return undo


def _watched_collective(
    name: str, original: Callable[..., Any], told: Callable[[str, dict[str, Any], str], None]
) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def watched(*args: Any, **options: Any) -> Any:
        frame = inspect.currentframe()
        caller = "" if frame is None or frame.f_back is None else str(frame.f_back.f_globals.get("__name__", ""))
        del frame  # it would keep itself alive
        told(name, dict(signature.bind(*args, **options).arguments), caller)
        return original(*args, **options)

    return watched


def rows_and_values(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which rows a sparse gradient of a table has, some more than once, and their values.

    The public methods refuse rows that are there more than once, and coalescing sorts them.
    """
    return gradient._indices()[0], gradient._values()
