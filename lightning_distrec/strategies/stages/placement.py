"""Where a module is split into stages, which rank has which weights of it, and how they are put back."""

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_distrec._compat.lightning import train_dataloaders
from lightning_distrec._compat.torch import apply_to_tensors, broadcast_module_states
from lightning_distrec.absent_tensors import AbsentTensor, absent_parameter
from lightning_distrec.chunks import Chunk, ChunkedTensor
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import ConfigError
from lightning_distrec.prefetch.peek import first_batches, loaders_in, unchanged, why_not
from lightning_distrec.strategies.checkpoints.optimizer_state import StateRanks
from lightning_distrec.strategies.estimates.block_profile import time_steps
from lightning_distrec.strategies.fully_sharded.shard_blocks import materialize
from lightning_distrec.strategies.stages.chain import StageLayout, find_chain, split_chain
from lightning_distrec.strategies.stages.logged_values import LoggedValues
from lightning_distrec.strategies.stages.stage_options import PipelineRanks, StageOptions
from lightning_distrec.units import format_bytes

Times = Callable[[], list[int] | None]
"""Collective. Returns the nanoseconds that each block takes."""
_split_as: "WeakKeyDictionary[nn.Module, tuple[StageOptions, StageLayout]]" = WeakKeyDictionary()
"""Module -> the options with which it is split, and where."""


def split_module(
    module: LightningModule,
    options: StageOptions,
    ranks: PipelineRanks,
    device: torch.device,
    consensus: Consensus,
    times: Times,
) -> StageLayout:
    """Collective. Keep the weights of this rank's stages on `device`, and drop the others, unless an earlier run has.

    All ranks begin with rank 0's weights; a
    stage on the meta device draws its own. Raises ConfigError, UnsupportedError on every rank: see `split_chain`.
    """
    if module in _split_as:
        before, layout = _split_as[module]
        if before != options:
            raise ConfigError(
                f"an earlier run has split this module as {before}; now it is {options}, and a module stays split as "
                "it is. Give the strategy the same options, or call trainer.strategy.unshard() after that run."
            )
    else:
        of_blocks = times() if options.split == "time" else None
        layout = consensus.all_or_none("setup", lambda: split_chain(module, options, ranks.num_stages, of_blocks))
        others = {name for name, stage in layout.stage_of.items() if stage not in ranks.stages}
        tensors = [*module.named_parameters(), *module.named_buffers()]
        on_meta = {name for name, tensor in tensors if tensor.is_meta}
        rank_zero_info(in_words(layout, module, options))
        apply_to_tensors(module, partial(_to_device, device))
        broadcast_module_states(module, list(on_meta))
        _drop_others(module, others)
        consensus.all_or_none("setup", partial(_draw_weights, module, on_meta - others, ranks, device))
        _send_to_replicas(module, on_meta - others, ranks)
        _split_as[module] = options, layout
    AbsentTensor.shown_device = device
    apply_to_tensors(module, partial(_to_device, device))
    return layout


def in_words(layout: StageLayout, module: nn.Module, options: StageOptions) -> str:
    """Return what each stage has, for the log."""
    sizes = [0] * layout.num_stages
    for name, parameter in module.named_parameters():
        sizes[layout.stage_of[name]] += parameter.numel() * parameter.itemsize
    stages = []
    for stage, size in enumerate(sizes):
        blocks = layout.blocks_of(stage)
        numbers = str(blocks[0]) if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]}"
        stages.append(f"stage {stage} has blocks {numbers}, weights of {format_bytes(size)}")
    return (
        f"pipeline_parallel: '{layout.chain.path}' in {layout.num_stages} stages, {options.schedule}, "
        f"{options.microbatches} micro-batches: {'; '.join(stages)}."
    )


def measure_blocks(
    trainer: Trainer, module: LightningModule, path: str, device: torch.device, consensus: Consensus
) -> list[int] | None:
    """Collective. Return the nanoseconds that each block's forward takes on rank 0; None: the run does not train.

    What training_step does before the chain counts with the first block, and what it does after it with the last one.
    Raises ConfigError on every rank: there is no batch to look at, or training_step fails here.
    """
    if trainer.state.fn != TrainerFn.FITTING:
        return None
    with unchanged(include_cuda=device.type == "cuda"):
        batch, reason = first_batch(trainer)

        def measure() -> list[int]:
            return _measured(trainer, module, path, batch, reason, device) if consensus.rank == 0 else []

        times = list(consensus.all_gather(consensus.all_or_none("setup", measure))[0])
    milliseconds = ", ".join(f"{nanoseconds / 1e6:.2g}" for nanoseconds in times)
    rank_zero_info(f"pipeline_parallel: the forwards of blocks take {milliseconds} ms.")
    return times


def _measured(
    trainer: Trainer, module: LightningModule, path: str, batch: Any, reason: str, device: torch.device
) -> list[int]:
    if reason:
        raise ConfigError(f"split='time': {reason}, so that no block can be timed. Set split='parameters'.")
    chain = find_chain(module, path)
    blocks = dict(zip(chain.paths, chain.blocks, strict=True))
    buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    log = LoggedValues(module)
    was_training = module.training
    try:
        module.to(device).train()
        batch = move_batch(trainer, module, batch, device)
        with torch.no_grad(), log.recorded(), log.metrics_unchanged():
            steps = time_steps(module, blocks, lambda: _step(module, batch), learns=False)
    except Exception as error:  # of the user's step; training meets it again
        raise ConfigError(
            f"split='time': training_step cannot run before training ({type(error).__name__}: {error}). Set "
            "split='parameters'."
        ) from error
    finally:
        module.train(was_training)
        for name, buffer in module.named_buffers():
            buffer.copy_(buffers[name])
    times = steps.chain_times(chain.paths)
    if times is None:
        raise ConfigError(
            f"split='time': training_step does not call every block of '{chain.path}'. Set split='parameters'."
        )
    return times.forward_nanoseconds


def _step(module: LightningModule, batch: Any) -> Any:
    takes_number = len(signature(module.training_step).parameters) > 1
    return module.training_step(batch, 0) if takes_number else module.training_step(batch)


def layout_of(module: nn.Module) -> StageLayout | None:
    """Return where a module is split; None: it is not."""
    return _split_as[module][1] if module in _split_as else None


def is_split(module: nn.Module) -> bool:
    """Whether a run has split a module into stages."""
    return module in _split_as


def _to_device(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.to(device)


def _draw_weights(module: nn.Module, names: set[str], ranks: PipelineRanks, device: torch.device) -> None:
    """Give this rank's tensors on the meta device values. Equal seeds would draw the same ones for all stages."""
    with torch.random.fork_rng():
        torch.manual_seed(torch.initial_seed() + ranks.rank)
        materialize(module, device, lambda name, _: name in names)


def _send_to_replicas(module: nn.Module, names: set[str], ranks: PipelineRanks) -> None:
    """Collective among the replicas of a stage. Let all have the first one's values."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in names:
            dist.broadcast(tensor.detach(), ranks.rank, group=ranks.same_stage)


def _drop_others(module: nn.Module, names: set[str]) -> None:
    absent = {id(p): absent_parameter(p) for name, p in module.named_parameters() if name in names}
    for submodule in module.modules():
        for name, parameter in list(submodule.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in absent:
                setattr(submodule, name, absent[id(parameter)])


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that this rank has."""
    return [parameter for parameter in module.parameters() if not isinstance(parameter, AbsentTensor)]


def chunked_state(state: Mapping[str, Any], layout: StageLayout, ranks: PipelineRanks) -> dict[str, Any]:
    """Return a module's state as checkpoints hold it: the values of each stage are those of its first replica."""
    return {key: _chunked(value, layout.stage_of.get(key), ranks) for key, value in state.items()}


def _chunked(value: Any, stage: int | None, ranks: PipelineRanks) -> Any:
    if stage is None or not isinstance(value, Tensor):
        return value
    shape = tuple(value.shape)
    chunks = [Chunk((0,) * len(shape), value.detach())] if stage in ranks.stages and not ranks.replica else []
    return ChunkedTensor(shape, value.dtype, chunks)


def state_ranks(module: nn.Module, layout: StageLayout, ranks: PipelineRanks) -> StateRanks:
    """Return which ranks hold the optimizer state of a parameter; those of the first replica save it."""
    stages = {id(parameter): layout.stage_of[name] for name, parameter in module.named_parameters()}
    return StateRanks(
        lambda parameter: stages.get(id(parameter), 0) % ranks.num_ranks,
        lambda parameter: not isinstance(parameter, AbsentTensor),
    )


def unsplit(module: nn.Module, full: Mapping[str, Tensor]) -> None:
    """Replace absent parameters by full ones, on the host. Those that `full` lacks are on the meta device."""
    new: dict[int, nn.Parameter] = {}
    for path, submodule in module.named_modules(remove_duplicate=False):
        for name, parameter in list(submodule.named_parameters(recurse=False, remove_duplicate=False)):
            key = f"{path}.{name}" if path else name
            value = full.get(key)
            if value is None:
                value = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            if id(parameter) not in new:
                new[id(parameter)] = nn.Parameter(value, parameter.requires_grad)
            setattr(submodule, name, new[id(parameter)])
    _restore_buffers(module, full)
    _split_as.pop(module, None)


def _restore_buffers(module: nn.Module, full: Mapping[str, Tensor]) -> None:
    for path, submodule in module.named_modules():
        for name, _ in list(submodule.named_buffers(recurse=False)):
            key = f"{path}.{name}" if path else name
            if key in full:
                setattr(submodule, name, full[key])


def first_batch(trainer: Trainer) -> tuple[Any, str]:
    """Return the first batch of the first loader that can be looked at, or None and why there is none."""
    obstacle = "there are no batches to train on"
    for loader in loaders_in(train_dataloaders(trainer)):
        if reason := why_not(loader):
            obstacle = reason
            continue
        with closing(first_batches(loader, 1)) as batches:
            for batch in batches:
                return batch, ""
    return None, obstacle


def move_batch(trainer: Trainer, module: LightningModule, batch: Any, device: torch.device) -> Any:
    """Return the batch on the device, passed through the user's hooks as the Trainer does."""
    data = getattr(trainer, "datamodule", None)
    for hook, arguments in (
        ("on_before_batch_transfer", ()),
        ("transfer_batch_to_device", (device,)),
        ("on_after_batch_transfer", ()),
    ):
        holder = data if data is not None and is_overridden(hook, data) else module
        batch = getattr(holder, hook)(batch, *arguments, 0)
    return batch
