"""Every private name of lightning, torch, torchrec and fbgemm that we use, one small function each.

A contract test per function (tests/contracts/test_compat.py) fails when an upstream release moves what is used here.
Imports are inside of the functions, so that this file loads without torchrec.
"""

import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch.loops import fetchers
from torch import nn
from torch.optim import Optimizer

DataFetcher = fetchers._DataFetcher
"""What Lightning's loops draw their batches from."""


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


def offsets_of(tensor: Any) -> tuple[int, ...]:
    """Return where the rectangle of a DTensor that this rank holds begins in the whole of it.

    Source: torch/distributed/tensor/_utils.py.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)[1])


def tell_device(module: Any, device: torch.device, mesh: Any) -> None:
    """Let a LightningModule's `device` and `device_mesh` be these; its `to` does it for the first, with all tensors.

    Source: lightning/fabric/utilities/device_dtype_mixin.py, lightning/pytorch/core/module.py.
    """
    from lightning.fabric.utilities.device_dtype_mixin import _update_properties

    _update_properties(module, device=device)
    module._device_mesh = mesh


def gathered_of(part: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the sharded parameters of what fully_shard cut, and what each is gathered into; those that were before.

    Source: torch/distributed/fsdp/_fully_shard; 2.11 has one group of parameters, later ones have several.
    """
    state = part._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:
        for parameter in group.fsdp_params if group is not None else []:
            if hasattr(parameter, "_unsharded_param"):
                yield parameter.sharded_param, parameter


def forget_unsent(parameter: Any) -> None:
    """Drop the gradient that a gathered parameter (see gathered_of) has added up without an exchange."""
    parameter.unsharded_accumulated_grad = None
    parameter._unsharded_param.grad = None


def writes_to(parameter: Any) -> int:
    """Return how often a gathered parameter (see gathered_of) was written to, but for being gathered."""
    return int(parameter._unsharded_param._version)


def whole_of(parameter: Any) -> Any:
    """Return what a gathered parameter (see gathered_of) is gathered into."""
    return parameter._unsharded_param


def clean_up_after_failure(module: Any) -> None:
    """Bring a fully sharded module into order that a failed step has left in its middle; torch 2.13 has a method.

    Source: torch/distributed/fsdp/_fully_shard, FSDPModule.reset_iter_state; which a module that never ran has not.
    """
    reset = getattr(module, "reset_iter_state", None)
    if reset is not None and module._get_fsdp_state()._is_root:
        reset()


def wrapped_optimizers(strategy: Any) -> list[Any]:
    """Return the LightningOptimizers of a strategy, whose `zero_grad` is not the wrapped optimizer's own.

    Source: lightning/pytorch/strategies/strategy.py, lightning/pytorch/core/optimizer.py.
    """
    return list(strategy._lightning_optimizers)


def is_view(tensor: torch.Tensor) -> bool:
    """Whether a tensor shares another's memory, as autograd knows of it. Source: torch/_tensor.py."""
    return bool(tensor._is_view())


def apply_to_tensors(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace every parameter and buffer of a module by what `function` makes of it, as Module.to does.

    Source: torch/nn/modules/module.py; fully sharded modules keep what they know of their parameters in step.
    """
    module._apply(function)


def class_before_fully_shard(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before fully_shard. Source: torch/distributed/fsdp/_fully_shard."""
    kind: type[nn.Module] = type(module).__mro__[module._orig_cls_mro_index]  # type: ignore[index]
    return kind


def without_fully_shard(state: dict[str, Any]) -> dict[str, Any]:
    """Return a module's attributes without what fully_shard has put there: its state, and hooks around forward.

    Source: torch/distributed/_composable/contract.py, torch/distributed/fsdp/_fully_shard/_fsdp_state.py.
    """
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    kept = {key: value for key, value in state.items() if key not in (REGISTRY_KEY, STATE_KEY)}
    for name in ("_forward_pre_hooks", "_forward_hooks"):
        kept[name] = type(kept[name])((key, h) for key, h in kept[name].items() if not _is_of_fully_shard(h))
    return kept


def drop_state_dict_hooks(module: nn.Module) -> None:
    """Remove the hooks around state_dict and its loading that fully_shard has put on a part of what it cut.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
    """
    for hooks in (module._state_dict_pre_hooks, module._load_state_dict_pre_hooks):
        for key in [key for key, hook in hooks.items() if _is_of_fully_shard(getattr(hook, "hook", hook))]:
            del hooks[key]


def _is_of_fully_shard(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp._fully_shard")


def store_of_ranks() -> Any:
    """Return the store of the default process group. Source: torch/distributed/distributed_c10d.py."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def exchanges_of_groups() -> list[int]:
    """Return how many exchanges this process has begun in each of its process groups, the oldest first.

    Source: torch/distributed/distributed_c10d.py; every backend counts its own, for just this comparison of ranks.
    """
    from torch.distributed.distributed_c10d import _world

    groups: list[Any] = list(_world.pg_map)
    return [group._get_sequence_number_for_group() for group in groups]


def train_dataloaders(trainer: Any) -> Any:
    """Return what there is to train on, asked for once more as Lightning does; None where there is nothing.

    Source: lightning/pytorch/loops/fit_loop.py, setup_data.
    """
    from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader

    source = trainer.fit_loop._data_source
    return _request_dataloader(source) if source.instance is not None and source.is_defined() else None


def combining_mode(combined_loader: Any) -> str:
    """Return how Lightning's CombinedLoader combines its loaders: "min_size", "sequential", ..."""
    return str(combined_loader._mode)


def loader_states(combined_loader: Any) -> list[dict[str, Any]]:
    """Return the states of the loaders that have one. Source: lightning/pytorch/utilities/combined_loader.py."""
    states: list[dict[str, Any]] = type(combined_loader)._state_dicts(combined_loader)
    return states


def keep_loader_states(combined_loader: Any, states: Callable[[], list[dict[str, Any]]] | None) -> None:
    """Make checkpoints hold these states of the loaders, in place of those that they have themselves; None undoes it.

    Source: lightning/pytorch/loops/fit_loop.py asks for them when a checkpoint is saved.
    """
    if states is not None:
        combined_loader._state_dicts = states
    else:
        combined_loader.__dict__.pop("_state_dicts", None)


def use_fetchers(trainer: Any, make: Callable[[Any], Any]) -> Callable[[], None]:
    """Let `make`, called with a stage, give the trainer's loops the fetchers of their data; returns an undo.

    It is not asked about steps that take a dataloader_iter.
    Source: lightning/pytorch/loops/utilities.py; the loops find `_select_data_fetcher` among their modules' globals,
    which is replaced once, by one that looks whether the trainer has a `make`.
    """
    from lightning.pytorch.loops import evaluation_loop, fit_loop, prediction_loop
    from lightning.pytorch.loops.utilities import _select_data_fetcher

    def select(of: Any, stage: Any) -> Any:
        chosen = _select_data_fetcher(of, stage)
        if isinstance(chosen, fetchers._DataLoaderIterDataFetcher) or of not in _makers:
            return chosen
        return _makers[of](stage)

    if fit_loop.__dict__["_select_data_fetcher"] is _select_data_fetcher:
        for module in (evaluation_loop, fit_loop, prediction_loop):
            module.__dict__["_select_data_fetcher"] = select
    _makers[trainer] = make

    def undo() -> None:
        _makers.pop(trainer, None)

    return undo


_makers: WeakKeyDictionary[Any, Callable[[Any], Any]] = WeakKeyDictionary()


def transfer_hook_once(module: Any, is_done: Callable[[Any], bool]) -> Callable[[], None]:
    """Do not call the user's on_before_batch_transfer for batches that are done with it; returns an undo.

    Source: lightning/pytorch/core/module.py; every loop calls it just before Strategy.batch_to_device.
    """
    hook = module._on_before_batch_transfer

    def once(batch: Any, dataloader_idx: int = 0) -> Any:
        return batch if is_done(batch) else hook(batch, dataloader_idx)

    module.__dict__["_on_before_batch_transfer"] = once

    def undo() -> None:
        module.__dict__.pop("_on_before_batch_transfer", None)

    return undo


def call_transfer_hook(module: Any, batch: Any, dataloader_idx: int) -> Any:
    """Call the user's on_before_batch_transfer, of the module or its data module."""
    return type(module)._on_before_batch_transfer(module, batch, dataloader_idx)


def pin_memory(batch: Any) -> Any:
    """Return the batch with its tensors in pinned memory. Source: torch/utils/data/_utils/pin_memory.py."""
    from torch.utils.data._utils.pin_memory import pin_memory as pin

    return pin(batch)


def choose_environments(is_ours: Callable[[Any], bool], choose: Callable[[], Any]) -> None:
    """Let `choose` decide about the cluster environment of a Trainer whose strategy `is_ours`.

    is_ours: told the strategy's name, or the strategy. What the user passes as a plugin stays, and so does everything
    for other strategies. Lightning decides before it makes the strategy, and some of its environments raise when they
    are made, so that a strategy cannot mend it later. Once for each process.
    Source: lightning/pytorch/trainer/connectors/accelerator_connector.py, `_choose_and_init_cluster_environment`.
    """
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    theirs = _AcceleratorConnector._choose_and_init_cluster_environment
    if hasattr(theirs, "theirs"):
        return

    def ours(self: Any) -> Any:
        if self._cluster_environment_flag is None and is_ours(self._strategy_flag):
            return choose()
        return theirs(self)

    ours.theirs = theirs  # type: ignore[attr-defined]
    _AcceleratorConnector._choose_and_init_cluster_environment = ours  # type: ignore[method-assign]


def replace_strategy(trainer: Any, strategy: Any) -> None:
    """Make `strategy` the trainer's, with the accelerator, devices, environment and plugins that the one before has.

    It gets a launcher of its own. Source: lightning/pytorch/trainer/connectors/accelerator_connector.py, which does
    the same for the strategy that a Trainer is made with.
    """
    connector = trainer._accelerator_connector
    connector.strategy = strategy
    connector._lazy_init_strategy()


def mark_stop(trainer: Any) -> None:
    """Let Lightning's loops know that all ranks stop."""
    trainer._signal_connector.received_sigterm = True


def agree_on_stop(trainer: Any, asked: Callable[[bool], None], leave: Callable[[], int | None]) -> Callable[[], None]:
    """Let signals only be noted, with `asked`, and call `leave` between the trainer's steps; returns an undo.

    asked: called with whether it was the signal that Slurm requeues by, and not SIGTERM. leave: returns the code with
    which the process is to end, None where it goes on.
    Lightning's handlers broadcast, and save, from inside of the signal, wherever the rank is, and its training loop
    broadcasts rank 0's flag at every step and waits for it. Source: lightning/pytorch/loops/training_epoch_loop.py,
    `advance`, and lightning/pytorch/trainer/connectors/signal_connector.py, whose `register_signal_handlers` runs after
    the strategy's setup.
    """
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    advance = loop.advance

    def terminate(signum: int, frame: Any) -> None:
        launcher = trainer.strategy.launcher
        if launcher is not None and not connector.received_sigterm:
            launcher.kill(signum)
        asked(False)

    def requeue(signum: int, frame: Any) -> None:
        asked(True)

    def look_first(data_fetcher: Any) -> None:
        if (code := leave()) is not None:
            mark_stop(trainer)
            raise SIGTERMException(code)
        advance(data_fetcher)

    connector.__dict__["_sigterm_notifier_fn"] = terminate
    connector.__dict__["_slurm_sigusr_handler_fn"] = requeue
    loop.__dict__["_broadcast_sigterm_tensor"] = lambda: None
    loop.__dict__["advance"] = look_first

    def undo() -> None:
        for name in ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"):
            connector.__dict__.pop(name, None)
        for name in ("_broadcast_sigterm_tensor", "advance"):
            loop.__dict__.pop(name, None)

    return undo


def find_resumed(trainer: Any, find: Callable[[], str | None]) -> None:
    """Let a fit without ckpt_path go on from the checkpoint that `find` returns; None: from none, by itself.

    Lightning takes any `hpc_ckpt_*` in the folder, whichever job has left it, where it believes to be in Slurm.
    Source: lightning/pytorch/trainer/connectors/checkpoint_connector.py, `_parse_ckpt_path`.
    """
    from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

    class Resumes(_CheckpointConnector):
        @property
        def _hpc_resume_path(self) -> str | None:
            return find()

        def _parse_ckpt_path(self, state_fn: Any, ckpt_path: Any, *args: Any, **options: Any) -> Any:
            if ckpt_path is None and state_fn == "fit" and find() is not None:
                ckpt_path = "hpc"
            return super()._parse_ckpt_path(state_fn, ckpt_path, *args, **options)

    trainer._checkpoint_connector.__class__ = Resumes


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


def forget_whole_tables(sharded: Any) -> None:
    """Let go of the whole tables that a sharded collection was made of; it keeps their parameters for their shapes.

    Source: EmbeddingShardingInfo in torchrec/distributed/embedding_sharding.py, kept by ShardedEmbeddingBagCollection.
    """
    for infos in getattr(sharded, "sharding_type_to_sharding_infos", {}).values():
        for info in infos:
            info.param = nn.Parameter(torch.empty_like(info.param, device="meta"), info.param.requires_grad)


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


def set_fbgemm_iterations(kernel: Any, num_steps: int) -> None:
    """Let a kernel go on counting its iterations, by which fused Adam corrects its bias, from here. Source: above."""
    kernel.iter.fill_(num_steps)
    kernel.iter_cpu.fill_(num_steps)


class FusedSplits:
    """Collective. The sizes of several lookups' ids on their way, in one exchange.

    splits: what each sharded module's input_dist returned inside of `sizes_only`. contexts: torchrec's, of each.
    say: numbers that every rank tells every other one beside.
    Source: FusedKJTListSplitsAwaitable in torchrec/distributed/embedding_sharding.py. It is made without a process
    group, so that it exchanges nothing, and gets the sizes once the exchange that says more is over.
    """

    def __init__(self, splits: list[Any], contexts: list[Any], say: tuple[int, ...]) -> None:
        from torchrec.distributed.dist_data import SplitsAllToAllAwaitable
        from torchrec.distributed.embedding_sharding import FusedKJTListSplitsAwaitable, KJTSplitsAllToAllMeta

        self._fused = FusedKJTListSplitsAwaitable(requests=splits, contexts=contexts, pg=None)
        metas = [meta for meta in self._fused._awaitables if isinstance(meta, KJTSplitsAllToAllMeta)]
        tensors = [tensor for meta in metas for tensor in meta.splits_tensors]
        self._num_said = len(say)
        self._sizes: Any = None
        if metas:
            num_ranks = metas[0].pg.size()
            said = [tensors[0].new_full((num_ranks,), number) for number in say]
            self._sizes = SplitsAllToAllAwaitable(tensors + said, metas[0].pg)

    def wait(self) -> tuple[list[Any], list[list[int]] | None]:
        """Collective. Let the ids travel. Return what to wait for, for each lookup, and what each rank has said.

        Nobody has said anything where nothing is exchanged.
        """
        if self._sizes is None:
            return self._fused.wait(), None
        rows = self._sizes.wait()
        sizes, said = rows[: len(rows) - self._num_said], rows[len(rows) - self._num_said :]
        self._fused._splits_awaitable = _Arrived(sizes)
        return self._fused.wait(), [list(of_rank) for of_rank in zip(*said, strict=True)]

    def drop(self) -> None:
        """Wait for the exchange of sizes and send no ids."""
        if self._sizes is not None:
            self._sizes.wait()


class _Arrived:
    """What needs no wait any more."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def wait(self) -> Any:
        return self._value


@contextlib.contextmanager
def sizes_only(sharded: Any, group: Any = None) -> Iterator[None]:
    """Inside of the context input_dist of `sharded` prepares the exchange of ids and starts none.

    group: of all ranks, that the ids are to travel on; None: that of the tables.
    Source: KJTAllToAllForward, in torchrec/distributed/train_pipeline/runtime_forwards.py, which torchrec's pipelines
    put in the place of KJTAllToAll.forward for good; here only for the call, so that other calls stay what they are.
    """
    from torchrec.distributed.dist_data import KJTAllToAll
    from torchrec.distributed.train_pipeline.runtime_forwards import KJTAllToAllForward

    exchanges = [dist._dist for dist in sharded._input_dists if isinstance(getattr(dist, "_dist", None), KJTAllToAll)]
    for exchange in exchanges:
        exchange.__dict__["forward"] = KJTAllToAllForward(
            pg=group or exchange._pg, splits=exchange._splits, stagger=exchange._stagger
        )
    try:
        yield
    finally:
        for exchange in exchanges:
            del exchange.__dict__["forward"]


def record_stream(ids: Any, context: Any, stream: torch.cuda.Stream) -> None:
    """Keep the memory of a lookup's ids and of its context until `stream` has used them.

    Source: PipelinedForward in torchrec/distributed/train_pipeline/runtime_forwards.py.
    """
    ids.record_stream(stream)
    context.record_stream(stream)


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


KEYED_TENSOR_VALUES = "_values"
"""Where torchrec's KeyedTensor keeps its values, and reads them. Source: torchrec/sparse/jagged_tensor.py."""

JAGGED_TENSOR_PARTS = ("_values", "_weights", "_lengths", "_offsets")
"""The same of JaggedTensor and KeyedJaggedTensor, which compute lengths and offsets when they are first asked for."""


def jagged_parts(jagged: Any) -> dict[str, torch.Tensor | None]:
    """Return what a KeyedJaggedTensor was made of, and computed since: values, weights, lengths, offsets."""
    return {name.removeprefix("_"): getattr(jagged, name) for name in JAGGED_TENSOR_PARTS}


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
        "FSDP2-wrapped module .* returned a view tensor",  # strategies/fully_sharded.py copies them
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


DCP_METADATA_NAMES = frozenset({
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
})
"""Module and name of all that the pickle of a checkpoint's metadata needs, besides torch's types: plain dataclasses, an
enum, and a lookup among torch's layouts. Source: torch/distributed/checkpoint/filesystem.py, finish."""


PythonUnpickler: Any = pickle._Unpickler
"""The unpickler that is written in Python, whose steps can be overridden. Source: Lib/pickle.py."""


def metadata_kinds() -> set[type]:
    """Return the dataclasses among DCP_METADATA_NAMES: their objects are built, and then given their state."""
    named = (getattr(importlib.import_module(module), name) for module, name in DCP_METADATA_NAMES)
    return {kind for kind in named if isinstance(kind, type) and dataclasses.is_dataclass(kind)}


def is_torch_constant(module: str, name: str) -> bool:
    """Whether `module.name` is one of torch's types of numbers, float32 for example."""
    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)


def dcp_places(metadata: Any) -> Iterator[tuple[str, str, int, int]]:
    """Yield, of each chunk of a checkpoint's tensors: the tensor's name, the file it is said to lie in, offset, length.

    Raises ValueError: what says so is of another kind. Source: torch/distributed/checkpoint/filesystem.py.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    for index, info in (metadata.storage_data or {}).items():
        if not isinstance(info, _StorageInfo) or not isinstance(info.relative_path, str):
            raise ValueError(f"'{index}' is said to lie in {info!r}")
        yield index.fqn, info.relative_path, info.offset, info.length


def rows_and_values(gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which rows a sparse gradient of a table has, some more than once, and their values.

    The public methods refuse rows that are there more than once, and coalescing sorts them.
    """
    return gradient._indices()[0], gradient._values()
