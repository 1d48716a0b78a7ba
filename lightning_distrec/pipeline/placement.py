"""Keeps the weights of this rank's stages alone, in set-up; saves them in checkpoints, and puts the
others back."""

from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_distrec._compat.torch import apply_to_tensors, broadcast_module_states
from lightning_distrec.chunks import Chunk, ChunkedTensor
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import ConfigError
from lightning_distrec.optimizers.gradient_hooks import note_replaced
from lightning_distrec.pipeline.absent_tensors import AbsentTensor, absent_parameter
from lightning_distrec.pipeline.chain import (
    PipelineRanks,
    StageLayout,
    StageOptions,
    split_chain,
)
from lightning_distrec.strategies.checkpoints.optimizer_state import StateRanks
from lightning_distrec.strategies.fully_sharded.shard_blocks import materialize
from lightning_distrec.strategies.fully_sharded.shards import full_or_meta, swap_parameters
from lightning_distrec.units import format_bytes

_split_as: "WeakKeyDictionary[nn.Module, tuple[StageOptions, StageLayout]]" = WeakKeyDictionary()
"""Module -> the options with which it is split, and where."""


def split_module(
    module: LightningModule,
    options: StageOptions,
    ranks: PipelineRanks,
    device: torch.device,
    consensus: Consensus,
) -> StageLayout:
    """Collective. Keep the weights of this rank's stages on `device`, and drop the others, unless
    an earlier run has.

    All ranks begin with rank 0's weights; a stage on the meta device draws its own.
    Raises ConfigError, UnsupportedError on every rank: see `split_chain`.
    """
    if module in _split_as:
        earlier_options, layout = _split_as[module]
        if earlier_options != options:
            raise ConfigError(
                f"an earlier run has split this module as {earlier_options}; now it is {options}. "
                "Give the strategy the same options, or call trainer.strategy.unshard() after that "
                "run."
            )
    else:
        layout = consensus.all_or_none(
            "setup", lambda: split_chain(module, options, ranks.num_stages)
        )
        rank_zero_info(describe_layout(layout, module, options))
        earlier = dict(module.named_parameters())
        absent_names = {
            name for name, stage in layout.stage_by_name.items() if stage not in ranks.stages
        }
        meta_names = {name for name, tensor in _named_tensors(module) if tensor.is_meta}
        apply_to_tensors(module, partial(_to_device, device))
        # Tensors on the meta device have no values to send; their stages draw them below.
        broadcast_module_states(module, list(meta_names))
        swap_parameters(
            module, lambda name, p: absent_parameter(p) if name in absent_names else None
        )
        drawn_names = meta_names - absent_names
        consensus.all_or_none("setup", partial(_draw_weights, module, drawn_names, ranks, device))
        for name, tensor in _named_tensors(module):
            if name in drawn_names:  # all replicas of a stage have the same ones
                # The first pipeline has the global ranks from 0 on, and `ranks.rank` is its rank
                # with this stage.
                dist.broadcast(tensor.detach(), ranks.rank, group=ranks.same_stage)
        for name, parameter in module.named_parameters():
            note_replaced(earlier[name], parameter)
        _split_as[module] = options, layout
    # On the class: a process is one rank, with one device.
    AbsentTensor.shown_device = device
    apply_to_tensors(module, partial(_to_device, device))
    return layout


def describe_layout(layout: StageLayout, module: nn.Module, options: StageOptions) -> str:
    """Return what each stage has, for the log."""
    sizes = [0] * layout.num_stages
    for name, parameter in module.named_parameters():
        sizes[layout.stage_by_name[name]] += parameter.numel() * parameter.itemsize
    stages = []
    for stage, size in enumerate(sizes):
        blocks = layout.block_numbers(stage)
        numbers = str(blocks[0]) if len(blocks) == 1 else f"{blocks[0]} to {blocks[-1]}"
        stages.append(f"stage {stage} has blocks {numbers}, weights of {format_bytes(size)}")
    return (
        f"pipeline_parallel: '{layout.chain.path}' in {layout.num_stages} stages, "
        f"{options.schedule}, {options.microbatches} micro-batches: {'; '.join(stages)}."
    )


def layout_of(module: nn.Module) -> StageLayout | None:
    """Return where a module is split; None: it is not."""
    return _split_as[module][1] if module in _split_as else None


def _named_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def _to_device(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor if tensor.is_meta else tensor.to(device)


def _draw_weights(
    module: nn.Module, names: set[str], ranks: PipelineRanks, device: torch.device
) -> None:
    """Give this rank's tensors on the meta device values. Equal seeds would draw the same ones for
    all stages."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(torch.initial_seed() + ranks.rank)
        materialize(module, device, lambda name, _: name in names)


def present_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that this rank has."""
    parameters = []
    for parameter in module.parameters():
        if not isinstance(parameter, AbsentTensor):
            parameters.append(parameter)
    return parameters


def chunked_state(
    state: Mapping[str, Any], layout: StageLayout, ranks: PipelineRanks
) -> dict[str, Any]:
    """Return a module's state as checkpoints hold it: the values of each stage are those of its
    first replica."""
    chunked = dict(state)
    for name, stage in layout.stage_by_name.items():
        value = state.get(name)
        if isinstance(value, Tensor):
            # One rank gives each chunk: the others have the shape alone, or are replicas with equal
            # values.
            is_saved = stage in ranks.stages and not ranks.replica
            chunks = [Chunk((0,) * value.dim(), value.detach())] if is_saved else []
            chunked[name] = ChunkedTensor(tuple(value.shape), value.dtype, chunks)
    return chunked


def state_ranks(module: nn.Module, layout: StageLayout, ranks: PipelineRanks) -> StateRanks:
    """Return which ranks hold the optimizer state of a parameter; those of the first replica save
    it."""
    # Stages are shared out in turn, stage 0 to rank 0: see `pipeline_ranks`.
    stages = {
        id(parameter): layout.stage_by_name[name] for name, parameter in module.named_parameters()
    }
    return StateRanks(
        lambda parameter: stages.get(id(parameter), 0) % ranks.num_ranks,
        lambda parameter: not isinstance(parameter, AbsentTensor),
    )


def unsplit(module: nn.Module, full: Mapping[str, Tensor]) -> None:
    """Replace absent parameters by full ones, on the host. Those that `full` lacks are on the meta
    device."""
    swap_parameters(module, partial(full_or_meta, full))
    for path, submodule in module.named_modules():
        for key, _ in list(submodule.named_buffers(path, recurse=False)):
            if key in full:
                setattr(submodule, key.rpartition(".")[2], full[key])
    _split_as.pop(module, None)
