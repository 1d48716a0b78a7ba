"""Private names of torch: autograd, process groups, DistributedDataParallel and modules."""

import copy
import functools
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import _get_sequence_nr, profiler
from torch.distributed import distributed_c10d
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _DDPSink
from torch.nn.utils import clip_grad
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._pytree import register_pytree_node
from torch.utils.hooks import RemovableHandle

from lightning_distrec._compat.gloo import tables_dist
from lightning_distrec._compat.patches import Patches


def share_hooks(original: nn.Module, module: nn.Module) -> None:
    """Share the forward and backward hooks of `original` with `module`, including those registered
    or removed later."""
    # The dicts themselves are shared, by writes into `__dict__` that nn.Module.__setattr__ does not
    # see: the handles that `register_...` returned refer to them, so that a handle removes a hook
    # from both modules.
    # Source: torch/nn/modules/module.py.
    for name, value in vars(original).items():
        if name.startswith(("_forward", "_backward", "_is_full_backward")):
            module.__dict__[name] = value


def have_gradient_hooks(parameters: list[nn.Parameter], but: int = 0) -> bool:
    """Return whether one of these has hooks of `register_hook`, or more than `but`
    post-accumulate-grad hooks."""
    num_hooks_after = map(len, filter(None, map(_HOOKS_AFTER, parameters)))
    return any(map(_HOOKS, parameters)) or max(num_hooks_after, default=0) > but


IN_BACKWARD = ("_in_backward_optimizers", "_optimizer_classes", "_optimizer_kwargs")
"""What `apply_optimizer_in_backward` sets on parameters; torchrec.optim wraps
torch/distributed/optim's."""


def in_backward_optimizers(parameter: nn.Parameter) -> list[Any]:
    """Return the optimizers that `apply_optimizer_in_backward` has given to a parameter."""
    # The only trace: its hook is on the AccumulateGrad node, which shows no hooks to Python.
    return list(getattr(parameter, IN_BACKWARD[0], ()))


def mark_in_backward(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    """Give a parameter the attributes that `apply_optimizer_in_backward` sets, without its hook.
    Source: as above."""
    marked: Any = parameter
    marked._in_backward_optimizers = [optimizer]
    marked._optimizer_classes = [type(optimizer)]
    marked._optimizer_kwargs = [
        {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    ]


@contextmanager
def without_in_backward(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside of the context hide what `apply_optimizer_in_backward` has set on the parameters.

    torchrec's sharding reads it: it would choose its kernels' optimizers by it, and write into the
    user's arguments.
    """
    # Source: torchrec/distributed/embeddingbag.py, create_embedding_bag_sharding's infos;
    # convert_to_fbgemm_types.
    hidden = []
    for parameter in parameters:
        attributes = parameter.__dict__
        hidden_attributes = {
            name: attributes.pop(name) for name in IN_BACKWARD if name in attributes
        }
        hidden.append((parameter, hidden_attributes))
    try:
        yield
    finally:
        for parameter, attributes in hidden:
            parameter.__dict__.update(attributes)


def copy_in_backward(source: nn.Parameter, target: nn.Parameter) -> None:
    """Give `target` optimizers like those that `apply_optimizer_in_backward` has given `source`,
    without state."""
    for optimizer in in_backward_optimizers(source):
        twin = copy.copy(optimizer)
        # torchrec's classes that only name a kernel have none
        if hasattr(optimizer, "param_groups"):
            twin.param_groups = [{**optimizer.param_groups[0], "params": [target]}]
            twin.state = defaultdict(dict)
            mark_in_backward(target, twin)
        else:
            target._in_backward_optimizers = [twin]  # type: ignore[attr-defined]


def apply_in_backward(source: Iterable[Any], target: nn.Parameter) -> None:
    """Give `target` new optimizers like those of `source`, with their hooks. Source: as above."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    for optimizer in source:
        arguments = {}
        for key, value in optimizer.param_groups[0].items():
            if key in optimizer.defaults:
                arguments[key] = value
        _apply_optimizer_in_backward(type(optimizer), [target], arguments)


def drop_in_backward_hooks(parameter: nn.Parameter) -> None:
    """Remove the hooks of `apply_optimizer_in_backward`, whose dicts would keep the parameter alive
    for ever."""
    # Source: as above. A weak dict by parameter, with AccumulateGrad nodes as values, which hold
    # the parameter.
    from torch.distributed.optim import apply_optimizer_in_backward as upstream

    for handle in upstream.param_to_optim_hook_handle_map.pop(parameter, ()):
        handle.remove()
    upstream.param_to_acc_grad_map.pop(parameter, None)


def move_in_backward(source: nn.Parameter, target: nn.Parameter) -> None:
    """Give `target` the optimizers that `apply_optimizer_in_backward` has given `source`, which has
    none then."""
    for name in IN_BACKWARD:
        if name in source.__dict__:
            target.__dict__[name] = source.__dict__.pop(name)


def has_tensor_hooks(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has hooks of `register_hook`, which may change its gradient."""
    return bool(_HOOKS(parameter))


def take_gradient_hooks(
    parameter: nn.Parameter,
) -> tuple[dict[int, Callable[[Any], Any]], Callable[[], None]]:
    """Take off what autograd calls when the parameter's gradient is complete, optimizers in
    backward as well.

    Returns the hooks of `register_post_accumulate_grad_hook`, in the dict from which their handles
    remove them; and what puts all back.
    """
    removed_hooks: list[tuple[Any, int, Any]] = []
    if in_backward_optimizers(parameter):
        from torch.distributed.optim.apply_optimizer_in_backward import (
            param_to_optim_hook_handle_map,
        )

        # They hang on the node that accumulates the gradient, which shows its hooks by their
        # handles alone.
        for handle in param_to_optim_hook_handle_map.get(parameter, []):
            node_hooks = handle.hooks_dict_ref()
            if node_hooks is not None and handle.id in node_hooks:
                removed_hooks.append((node_hooks, handle.id, node_hooks.pop(handle.id)))
    tensor: Any = parameter
    hooks = tensor._post_accumulate_grad_hooks or OrderedDict()
    # autograd would keep the old ones if it were None
    tensor._post_accumulate_grad_hooks = OrderedDict()

    def put_back() -> None:
        hooks.update(tensor._post_accumulate_grad_hooks)  # those that were registered since
        tensor._post_accumulate_grad_hooks = hooks
        for node_hooks, key, hook in removed_hooks:
            node_hooks[key] = hook

    return hooks, put_back


def leave_optimizers_in_backward(ddp: Any) -> None:
    """Keep a new DistributedDataParallel from stepping optimizers in backward itself."""
    # It would die where there is no accelerator, step once for several batches that accumulate, and
    # take the place of our hooks for its buckets. Source: DistributedDataParallel._lazy_init, in
    # the first forward; it does nothing else.
    ddp._lazy_init_ran = True


_HOOKS = attrgetter("_backward_hooks")
_HOOKS_AFTER = attrgetter("_post_accumulate_grad_hooks")


def watch_total_norm(check: Callable[[list[torch.Tensor]], None]) -> Patches:
    """Call `check` with the gradients whose norm torch.nn.utils.clip_grad_norm_ is about to
    take."""
    # Upstream takes the norm of this rank's shards alone, without a word; `check` can refuse. Users
    # import the function itself, so it is `_get_total_norm`, which it reads from its module's
    # globals, that is replaced. Can go when our parameters are DTensors throughout, whose norms
    # torch takes over all ranks.
    # Source: torch/nn/utils/clip_grad.py.
    original = clip_grad._get_total_norm

    def watched(tensors: Any, *args: Any, **options: Any) -> torch.Tensor:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        check(tensors)
        return original(tensors, *args, **options)

    patches = Patches()
    patches.replace(clip_grad, "_get_total_norm", watched)
    return patches


ignore_in_ddp: Callable[[nn.Module, list[str]], None]
ignore_in_ddp = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
"""Makes a later DistributedDataParallel(module) neither broadcast nor reduce the tensors with these
names."""


def broadcast_module_states(module: nn.Module, ignore: list[str]) -> None:
    """Collective. Broadcast rank 0's parameters and buffers to all ranks, except those named in
    `ignore`."""
    # Source: torch/distributed/utils.py; DDPStrategy.setup calls it for evaluation, and would
    # overwrite shards.
    _sync_module_states(module, distributed_c10d._get_default_group(), 250 * 2**20, 0, ignore)


is_view = torch.Tensor._is_view
"""Returns whether autograd knows a tensor as a view of another."""


def apply_to_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer of a module by `function` of it, as Module.to does."""
    # Source: torch/nn/modules/module.py; FSDP2 overrides it to keep its state of the parameters up
    # to date.
    module._apply(function)


default_store = distributed_c10d._get_default_store
"""Returns the store of the default process group."""


def abort_process_groups() -> None:
    """Give up the collectives of all NCCL groups, whose peers may be gone; the groups can be
    destroyed then."""
    # Source: torch/distributed/distributed_c10d.py; not for gloo. Can go when torch has a public
    # name for it.
    distributed_c10d._abort_process_group()


def collective_counts() -> list[int]:
    """Return how many collectives this process has started in each of its process groups, oldest
    group first."""
    # Source: torch/distributed/distributed_c10d.py; backends keep these counters to compare ranks
    # by them.
    groups: list[Any] = list(distributed_c10d._world.pg_map)
    return [group._get_sequence_number_for_group() for group in groups]


def order_backward(outputs: list[torch.Tensor], since: int, first: int) -> int:
    """Make backward run the nodes created since `since` that lead to `outputs` before all others.

    since: what `next_backward_number` returned before they were created. first: the first of their
    new numbers. Returns how many numbers, counted from `first`, are used.
    """
    # Among the nodes that are ready, autograd runs the one with the highest sequence number, so
    # that the nodes created last run first. Lookups are created first, and their gradients, which
    # other ranks wait for, would be sent last.
    # Source: torch/csrc/autograd/python_cpp_function.h, since torch 2.2; engine.cpp,
    # CompareNodeTaskTime.
    nodes: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    num_used = 0
    while nodes:
        node = nodes.pop()
        number = node._sequence_nr()
        if since <= number < FIRST_ORDERED:  # created since, and not renumbered yet
            node._set_sequence_nr(first + number - since)
            num_used = max(num_used, number - since + 1)
            nodes += [following for following, _ in node.next_functions if following is not None]
    return num_used


def reached_leaves(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the ids of the leaf tensors that backward from `tensors` would give a gradient."""
    # AccumulateGrad nodes alone have a `variable`. Source:
    # torch/csrc/autograd/functions/accumulate_grad.h.
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen = set(nodes)
    leaves = set()
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            leaves.add(id(variable))
        new = []
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                new.append(following)
        seen.update(new)
        nodes += new
    return leaves


def is_ddp_sink(node: Any) -> bool:
    """Return whether an autograd node is the one that DDP puts behind its outputs, which only
    passes gradients on."""
    # Source: torch/nn/parallel/distributed.py, with find_unused_parameters and where nothing has
    # been reduced.
    return isinstance(node, _DDPSink._backward_cls)


def profiler_runs() -> bool:
    """Return whether a profiler of torch records; takes a tenth of a microsecond."""
    # Source: torch/autograd/profiler.py, whose record_function looks for a profiler only after it
    # has called C++.
    return profiler._is_profiler_enabled


def saved_tensors_are_hooked() -> bool:
    """Return whether saved-tensor hooks are active, as inside of
    torch.utils.checkpoint(use_reentrant=False)."""
    # Source: torch/csrc/autograd/saved_variable_hooks.h; torch.autograd.graph.saved_tensors_hooks
    # sets them.
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


next_backward_number = _get_sequence_nr
"""Returns the sequence number of the next autograd node on this thread."""

FIRST_ORDERED = 2**60
"""Above all sequence numbers that autograd assigns, except those of leaves."""


def version_of(tensor: torch.Tensor) -> int | None:
    """Return a tensor's version, which each write in place increments; None for inference tensors,
    which have none."""
    return None if tensor.is_inference() else tensor._version


def versions_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return the versions of tensors that are no inference tensors, at no Python call for each."""
    return list(map(_VERSION, tensors))


_VERSION = attrgetter("_version")


register_container: Callable[..., None] = register_pytree_node
"""Registers a container type with torch's pytree, which looks containers up by their exact type, as
torchrec does."""


@contextmanager
def sizes_from_zero() -> Iterator[None]:
    """Let torch.export give free sizes no lower limit than 0; otherwise its programs refuse a batch
    of one."""
    # Source: torch/fx/experimental/_config.py.
    from torch.fx.experimental import _config

    with _config.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        yield


def in_backward() -> bool:
    """Return whether this thread is running a backward."""
    return current_backward() != -1


current_backward: Callable[[], int] = torch._C._current_graph_task_id  # type: ignore[attr-defined]
"""Returns a number of the backward that this thread is running, which no other has; -1: it runs
none."""


def watch_collectives(
    names: tuple[str, ...], on_call: Callable[[str, dict[str, Any], str], None]
) -> Patches:
    """Call `on_call` before each call of these functions of torch.distributed.

    on_call: gets the function's name, its arguments by name, and the name of the module that calls
    it.
    Functions that this torch lacks are skipped. Seen are calls that read the function from
    torch.distributed at the time of the call, as torchrec and Lightning do; calls from torch's C++
    (DistributedDataParallel) are not.
    """
    # torch has no hook for this short of its profiler, which costs more than a step; can go when it
    # has one.
    patches = Patches()
    for target in (dist, tables_dist):
        for name in vars(target).keys() & set(names):
            patches.replace(target, name, _watched_collective(name, getattr(target, name), on_call))
    return patches


def _watched_collective(
    name: str, original: Callable[..., Any], on_call: Callable[[str, dict[str, Any], str], None]
) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def watched(*args: Any, **options: Any) -> Any:
        frame = inspect.currentframe()
        caller = (
            ""
            if frame is None or frame.f_back is None
            else str(frame.f_back.f_globals.get("__name__", ""))
        )
        del frame  # it would keep itself alive
        on_call(name, dict(signature.bind(*args, **options).arguments), caller)
        return original(*args, **options)

    return watched


without_torch_function = torch._C.DisableTorchFunctionSubclass
"""A context in which subclasses of Tensor are plain tensors. Source:
torch/csrc/utils/disable_torch_function.cpp."""


def register_first_step_post_hook(
    optimizer: torch.optim.Optimizer, hook: Callable[..., None]
) -> RemovableHandle:
    """Call `hook` after each step, before the hooks that are registered so far. Source:
    torch/optim/optimizer.py."""
    handle = optimizer.register_step_post_hook(hook)
    hooks: Any = optimizer._optimizer_step_post_hooks
    hooks.move_to_end(handle.id, last=False)
    return handle


def use_foreach_for(kind: type[torch.Tensor]) -> None:
    """Let optimizers take their foreach form for parameters of this class too, as for Parameter
    itself."""
    # They compare exact types. Source: torch/optim/optimizer.py.
    if kind not in _foreach_supported_types:
        _foreach_supported_types.append(kind)


def norms_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the 2-norms of tensors of one device and type, by few kernels. Source:
    torch/nn/utils/clip_grad.py."""
    return list(torch._foreach_norm(tensors, 2.0))


scale_all = torch._foreach_mul_
"""Multiplies tensors of one device and type by a number, in place and by few kernels."""


def has_comm_hook(ddp: Any) -> bool:
    """Return whether a function in Python exchanges DDP's gradients. Source:
    DistributedDataParallel._comm_hooks."""
    return bool(ddp._comm_hooks)
