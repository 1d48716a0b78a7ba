"""Every private name of lightning, torch, torchrec and fbgemm that we use, one small function each.

A contract test per function (tests/contracts/test_compat.py) fails when an upstream release moves what is used here.
Imports are inside of the functions, so that this file loads without torchrec.
"""

import contextlib
import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def init_optimizers_and_schedulers(module: Any) -> tuple[list[Optimizer], list[Any]]:
    """Call the module's configure_optimizers and return its optimizers, unwrapped, and scheduler configs.

    Source: lightning/pytorch/core/optimizer.py; Strategy.setup_optimizers calls the same function.
    """
    from lightning.pytorch.core.optimizer import LightningOptimizer, _init_optimizers_and_lr_schedulers

    optimizers, schedulers = _init_optimizers_and_lr_schedulers(module)
    return [o.optimizer if isinstance(o, LightningOptimizer) else o for o in optimizers], schedulers


def move_optimizers_to_device(optimizers: list[Optimizer], device: torch.device) -> None:
    """Move the optimizers' state to `device`. Source: lightning/fabric/utilities/optimizer.py."""
    from lightning.fabric.utilities.optimizer import _optimizers_to_device

    _optimizers_to_device(optimizers, device)


def average_model(callback: Any) -> nn.Module | None:
    """Return what WeightAveraging or StochasticWeightAveraging keeps its average in; None before its setup.

    Source: lightning/pytorch/callbacks/weight_averaging.py and stochastic_weight_avg.py.
    """
    model: nn.Module | None = callback._average_model
    return model


def set_average_model(callback: Any, model: nn.Module) -> None:
    """Make the callback keep its average in `model`; of it, it uses `to`, `parameters` and `state_dict`."""
    callback._average_model = model


def unscales_in_step(optimizer: Optimizer) -> bool:
    """Whether the optimizer looks for overflows inside of `step`, as torch's fused ones do.

    Source: lightning/fabric/plugins/precision/amp.py.
    """
    from lightning.fabric.plugins.precision.amp import _optimizer_handles_unscaling

    return bool(_optimizer_handles_unscaling(optimizer))


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


def send_module_states(module: nn.Module, ignore: list[str]) -> None:
    """Collective. Give every rank rank 0's parameters and buffers, but for those called `ignore`.

    Source: torch/distributed/utils.py; DDPStrategy.setup calls it for evaluation, shards included.
    """
    from torch.distributed.distributed_c10d import _get_default_group
    from torch.distributed.utils import _sync_module_states

    _sync_module_states(module, _get_default_group(), 250 * 2**20, 0, ignore)


def attach_fused_optimizer(parameter: nn.Parameter, arguments: dict[str, Any], group: str) -> None:
    """Tell torchrec which in-backward optimizer a table gets when it is sharded.

    arguments: FBGEMM's, with "optimizer" an EmbOptimType and "learning_rate" in place of "lr".
    group: tables of different groups get kernels of their own, and so learning rates of their own.
    Source: torchrec/distributed/embeddingbag.py, create_grouped_sharding_infos, reads these two attributes; the key
    "_batch_key" only separates groups (embedding_sharding.py, group_tables). torch's _apply_optimizer_in_backward sets
    the same attributes, and hooks that are of no use here.
    """
    parameter._optimizer_classes = [None]  # type: ignore[attr-defined]
    parameter._optimizer_kwargs = [{**arguments, "_batch_key": group}]  # type: ignore[attr-defined]


def detach_fused_optimizer(parameter: nn.Parameter) -> None:
    """Undo `attach_fused_optimizer`, so that the table can be sharded with another update later."""
    for name in ("_optimizer_classes", "_optimizer_kwargs"):
        if hasattr(parameter, name):
            delattr(parameter, name)


def forget_rows(collection: Any) -> None:
    """Free the weights of an unsharded collection and keep its tables, on meta.

    Source: torchrec/modules/embedding_modules.py; `_device` is what the `device` property returns, and a sharded
    collection made from a CUDA one would load its rows (torchrec/distributed/embeddingbag.py, end of __init__).
    """
    collection.to("meta")
    collection._device = torch.device("meta")


def leave_mean_to_us(sharded: Any) -> None:
    """Stop torchrec from dividing the output of a sharded EmbeddingBagCollection by bag sizes.

    Rows of a mean-pooled table that is cut by rows are summed over ranks first and divided after. torchrec 1.8 then
    divides the columns of every table of the collection, but for sum-pooled tables that are cut by rows too: tables cut
    otherwise come out divided once too often (embeddingbag.py, _create_mean_pooling_divisor). sharding/lookup.py
    divides the columns that need it.
    """
    sharded._has_mean_pooling_callback = False


def fbgemm_kernels(sharded: nn.Module) -> list[Any]:
    """Return the FBGEMM modules that hold a sharded collection's fused tables on this rank.

    Source: ShardedEmbedding(Bag)Collection keeps its lookups in a plain list, `_lookups`, outside of modules().
    """
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

    lookups: list[nn.Module] = sharded._lookups  # type: ignore[assignment]
    return [m for lookup in lookups for m in lookup.modules() if isinstance(m, SplitTableBatchedEmbeddingBagsCodegen)]


@contextlib.contextmanager
def fbgemm_iterations_kept(kernels: list[Any]) -> Iterator[None]:
    """Undo what forwards inside of the context add to the kernels' iteration counters.

    Every forward advances them, evaluation included, and fused Adam corrects its bias by them. Source: `iter` and
    `iter_cpu` in fbgemm_gpu/split_table_batched_embeddings_ops_training.py, _forward_impl.
    """
    before = [(kernel, kernel.iter.clone(), kernel.iter_cpu.clone()) for kernel in kernels]
    try:
        yield
    finally:
        for kernel, iteration, iteration_cpu in before:
            kernel.iter.copy_(iteration)
            kernel.iter_cpu.copy_(iteration_cpu)


KEYED_TENSOR_VALUES = "_values"
"""Where torchrec's KeyedTensor keeps its values, and reads them. Source: torchrec/sparse/jagged_tensor.py."""

JAGGED_TENSOR_PARTS = ("_values", "_weights", "_lengths", "_offsets")
"""The same of JaggedTensor and KeyedJaggedTensor, which compute lengths and offsets when they are first asked for."""


def register_container(
    kind: type, flatten: Callable[[Any], tuple[list[Any], Any]], unflatten: Callable[[Iterable[Any], Any], Any]
) -> None:
    """Tell torch how to take a container apart; it knows containers by their exact type.

    Source: torch/utils/_pytree.py, which torchrec registers its own containers with.
    """
    from torch.utils._pytree import register_pytree_node

    register_pytree_node(kind, flatten, unflatten)


def hide_upstream_deprecations() -> None:
    """Hide what torchrec, torch and lightning say about their own use of each other; users cannot act on it.

    Can go when torchrec has left ShardedTensor, reduce_scatter_tensor, all_gather_into_tensor and is_fx_tracing, and
    lightning isinstance(..., LeafSpec).
    """
    for message in (
        "Please use DTensor instead and we are deprecating ShardedTensor",
        "`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
        "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
        "Sparse invariant checks are implicitly disabled",
    ):
        warnings.filterwarnings("ignore", message=message)
    logging.getLogger("torch.fx._symbolic_trace").addFilter(_not_about_fx_tracing)


def _not_about_fx_tracing(record: logging.LogRecord) -> bool:
    return "is_fx_tracing" not in str(record.msg)


@contextlib.contextmanager
def torchrec_quiet() -> Iterator[None]:
    """Silence torchrec's planner and sharders below ERROR: their warnings speak of what we decide ourselves.

    Source: Topology.__init__ warns that "the job will fail" unless it was made by a factory that torchrec 1.6 lacks.
    """
    logger = logging.getLogger("torchrec")
    root = logging.getLogger()
    levels = logger.level, root.level
    logger.setLevel(logging.ERROR)
    root.setLevel(max(root.level, logging.ERROR))
    try:
        yield
    finally:
        logger.setLevel(levels[0])
        root.setLevel(levels[1])


def batches_that_stepped(trainer: Any) -> int:
    """Return the number that Lightning gives its loggers as the step of the batch in progress, counted from 0.

    Source: lightning/pytorch/loops/training_epoch_loop.py; LearningRateMonitor uses it in the same way.
    """
    return int(trainer.fit_loop.epoch_loop._batches_that_stepped)


def show_in_progress_bar(trainer: Any, name: str, value: str) -> None:
    """Show `value` beside the other metrics of the progress bar.

    `LightningModule.log(prog_bar=True)` would make a tensor on the device and read it back, which waits for a GPU.
    Source: lightning/pytorch/trainer/connectors/logger_connector/logger_connector.py, progress_bar_metrics.
    """
    trainer._logger_connector._progress_bar_metrics[name] = value


def in_backward() -> bool:
    """Whether this thread is running a backward. Source: torch/csrc/autograd/python_autograd.cpp."""
    return bool(torch._C._current_graph_task_id() != -1)  # type: ignore[attr-defined]


def ddp_of_whole_tables(sharded: Any) -> list[Any]:
    """Return the DDPs in which torchrec wraps a sharded collection's data_parallel tables.

    Source: init_data_parallel in torchrec/distributed/embeddingbag.py and embedding.py; `_lookups` is a plain list.
    """
    from torch.nn.parallel import DistributedDataParallel

    return [lookup for lookup in sharded._lookups if isinstance(lookup, DistributedDataParallel)]


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
