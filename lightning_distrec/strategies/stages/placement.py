"""Which rank has which weights of a module that is cut into stages, and how they become whole again."""

from collections.abc import Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_distrec._compat.torch import apply_to_tensors, broadcast_module_states
from lightning_distrec.chunks import Chunk, ChunkedTensor
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import ConfigError
from lightning_distrec.strategies.stages.absent import AbsentTensor, absent_parameter
from lightning_distrec.strategies.stages.chain import Cut, cut_chain
from lightning_distrec.strategies.stages.pipeline_mesh import PipelineRanks
from lightning_distrec.strategies.stages.stage_options import StageOptions

_cut_as: "WeakKeyDictionary[nn.Module, tuple[StageOptions, Cut]]" = WeakKeyDictionary()
"""Module -> the options with which it is cut, and where."""


def cut_module(
    module: LightningModule, options: StageOptions, ranks: PipelineRanks, device: torch.device, consensus: Consensus
) -> Cut:
    """Collective. Keep the weights of this rank's stages on `device`, and drop the others, unless an earlier run has.

    All ranks begin with rank 0's weights. Raises ConfigError, UnsupportedError on every rank: see `cut_chain`.
    """
    if module in _cut_as:
        before, cut = _cut_as[module]
        if before != options:
            raise ConfigError(
                f"an earlier run has cut this module as {before}; now it is {options}, and a module stays cut as it is. "
                "Give the strategy the same options, or call trainer.strategy.unshard() after that run."
            )
    else:
        cut = consensus.all_or_none("setup", lambda: cut_chain(module, options, ranks.num_stages))
        module.to(device)
        broadcast_module_states(module, [])
        _drop_others(module, {name for name, stage in cut.stage_of.items() if stage not in ranks.stages})
        _cut_as[module] = options, cut
    AbsentTensor.shown_device = device
    apply_to_tensors(module, partial(_to_device, device))
    return cut


def cut_of(module: nn.Module) -> Cut | None:
    """Return where a module is cut; None: it is whole."""
    return _cut_as[module][1] if module in _cut_as else None


def is_cut(module: nn.Module) -> bool:
    """Whether a run has cut a module into stages."""
    return module in _cut_as


def _to_device(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, AbsentTensor) else tensor.to(device)


def _drop_others(module: nn.Module, names: set[str]) -> None:
    absent = {id(p): absent_parameter(p) for name, p in module.named_parameters() if name in names}
    for submodule in module.modules():
        for name, parameter in list(submodule.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in absent:
                setattr(submodule, name, absent[id(parameter)])


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that this rank has."""
    return [parameter for parameter in module.parameters() if not isinstance(parameter, AbsentTensor)]


def chunked_state(state: Mapping[str, Any], cut: Cut, ranks: PipelineRanks) -> dict[str, Any]:
    """Return a module's state as checkpoints hold it: the values of each stage are those of its first replica."""
    return {key: _chunked(value, cut.stage_of.get(key), ranks) for key, value in state.items()}


def _chunked(value: Any, stage: int | None, ranks: PipelineRanks) -> Any:
    if stage is None or not isinstance(value, Tensor):
        return value
    shape = tuple(value.shape)
    chunks = [Chunk((0,) * len(shape), value.detach())] if stage in ranks.stages and not ranks.replica else []
    return ChunkedTensor(shape, value.dtype, chunks)


class OptimizerStateRanks:
    """Which ranks hold the optimizer state of a parameter, and which one saves it."""

    def __init__(self, module: nn.Module, cut: Cut, ranks: PipelineRanks) -> None:
        self._stages = {id(parameter): cut.stage_of[name] for name, parameter in module.named_parameters()}
        self._ranks = ranks

    def saved_by(self, parameter: Tensor) -> int:
        """Return the rank that saves it: the one of the first replica."""
        return self._stages.get(id(parameter), 0) % self._ranks.num_ranks

    def is_here(self, parameter: Tensor) -> bool:
        """Whether this rank has it."""
        return not isinstance(parameter, AbsentTensor)


def make_whole(module: nn.Module, full: Mapping[str, Tensor]) -> None:
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
    _cut_as.pop(module, None)


def _restore_buffers(module: nn.Module, full: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            if name in full:
                buffer.copy_(full[name])
