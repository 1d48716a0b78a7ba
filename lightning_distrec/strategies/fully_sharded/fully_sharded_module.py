"""A module, or its layers without tables, whose parameters FSDP2 shards: what a strategy does around its steps."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_distrec._compat.fully_shard import (
    draw_dtensors_with,
    drop_gathered_ahead,
    drop_unreduced_gradient,
    reset_after_failure,
    sharded_and_unsharded_parameters,
    unsharded_parameter,
    unsharded_version,
)
from lightning_distrec._compat.lightning import set_device_and_mesh
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import ConfigError, UnsupportedError
from lightning_distrec.optimizers.mixed_groups import uniform_groups
from lightning_distrec.strategies.activations.budget import NOTHING, CheckpointedLayers, NothingCheckpointed
from lightning_distrec.strategies.activations.layers import checkpointed_layers
from lightning_distrec.strategies.fully_sharded.blocks import choose_blocks
from lightning_distrec.strategies.fully_sharded.deep_copy import STEPS, gather_in_steps
from lightning_distrec.strategies.fully_sharded.draws import draw_full
from lightning_distrec.strategies.fully_sharded.dtypes import Dtypes, choose_dtypes
from lightning_distrec.strategies.fully_sharded.fsdp_options import FSDPOptions
from lightning_distrec.strategies.fully_sharded.guards import guard
from lightning_distrec.strategies.fully_sharded.refusals import (
    explained_errors,
    refuse_mixed_dtypes,
    refuse_module,
)
from lightning_distrec.strategies.fully_sharded.replicated_parameters import (
    ReplicatedParameters,
    choose_replicated,
    log_replicated,
)
from lightning_distrec.strategies.fully_sharded.shard_blocks import (
    Sharding,
    fsdp_modules,
    is_block,
    modules_in_step,
)
from lightning_distrec.strategies.run.buffer_broadcasts import BroadcastSkipper, BufferBroadcaster

_sharded_as: "WeakKeyDictionary[nn.Module, tuple[FSDPOptions, Dtypes]]" = WeakKeyDictionary()
"""Fully sharded module -> the options and types with which it was sharded."""


def drop_unfinished_step(module: nn.Module) -> None:
    """Reset a fully sharded module that a failed run may have left with gathered parameters and unreduced gradients."""
    if isinstance(module, FSDPModule):
        reset_after_failure(module)
    for fsdp_module in fsdp_modules(module):
        fsdp_module.reshard()
        for _, unsharded in sharded_and_unsharded_parameters(fsdp_module):
            drop_unreduced_gradient(unsharded)


def shard_module(
    module: LightningModule,
    options: FSDPOptions,
    mesh: DeviceMesh,
    device: torch.device,
    precision: str,
    consensus: Consensus,
) -> "FullyShardedModule":
    """Collective. Shard the module, with rank 0's weights, unless an earlier run has.

    mesh: of all ranks.
    Raises ConfigError, UnsupportedError on every rank: it cannot be sharded so, or was sharded otherwise.
    """
    wanted = options, choose_dtypes(options, precision)
    if isinstance(module, FSDPModule):
        _refuse_other_options(_sharded_as.get(module, wanted), wanted)
    else:
        blocks = consensus.all_or_none("setup", lambda: _choose_blocks(module, options))
        replicated = choose_replicated(module, blocks, module.automatic_optimization)
        log_replicated(replicated, rank_zero_info)
        Sharding(mesh, device, *wanted).shard(module, blocks, set(replicated.values()))
        gather_in_steps(module, [step for step in STEPS if is_overridden(step, module)])
        guard(module)
        _sharded_as[module] = wanted
    set_device_and_mesh(module, device, mesh)
    return FullyShardedModule(module, options, consensus)


def _choose_blocks(module: nn.Module, options: FSDPOptions) -> list[nn.Module]:
    refuse_module(module)
    blocks = choose_blocks(module, options.wrap, options.min_num_parameters)
    refuse_mixed_dtypes(module, blocks)
    own = {id(block) for block in blocks}
    paths = {path: submodule for path, submodule in module.named_modules() if id(submodule) in own}
    checkpointed_layers(module, options.activation_checkpointing, paths)  # raises where it cannot be
    return blocks


def _refuse_other_options(before: tuple[FSDPOptions, Dtypes], wanted: tuple[FSDPOptions, Dtypes]) -> None:
    if before != wanted:
        raise ConfigError(
            f"an earlier run has sharded this module as {before[0]}, computing in {before[1].param or 'its own type'}; "
            f"now it is {wanted[0]}, in {wanted[1].param or 'its own type'}, and a sharded module stays so. Give the "
            "strategy the same options and precision, or build a new module and load a checkpoint into it."
        )


class FullyShardedModule:
    """Runs the steps of a sharded module during one run. The module stays sharded between runs."""

    def __init__(self, module: nn.Module, options: FSDPOptions, consensus: Consensus) -> None:
        self._module = module
        self._fsdp_modules = fsdp_modules(module)
        blocks = {path: block for path, block in module.named_modules() if path and is_block(block)}
        wanted = options.activation_checkpointing
        self.activations: CheckpointedLayers | NothingCheckpointed = NothingCheckpointed()
        if wanted:
            self.activations = CheckpointedLayers(module, wanted, consensus, blocks)
        self._prefetches = options.forward_prefetch > 0 or options.backward_prefetch > 0
        self._replicated = ReplicatedParameters(module)
        self._buffers: BufferBroadcaster | None = None
        self._broadcasts_buffers = self._syncs_gradients = True
        self._undo: list[Callable[[], None]] = [self.activations.undo]
        if any(p.device.type == "cpu" for p in module.parameters() if isinstance(p, DTensor)):
            self._undo.append(draw_dtensors_with(draw_full))

    def begin_training(self, optimizers: Iterable[Optimizer], consensus: Consensus) -> BroadcastSkipper:
        """Broadcast rank 0's buffers before steps from now on; let zero_grad reach unreduced gradients."""
        self._buffers = BufferBroadcaster(self._module)
        self._replicated.host_group = consensus.group
        self._undo += [_zero_unreduced_too(optimizer, self._module) for optimizer in optimizers]
        return BroadcastSkipper(self._buffers, consensus.flags)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step of any kind. Collective where buffers are broadcast.

        Raises UnsupportedError: the step has written to weights while they were gathered.
        """
        self.reshard()  # weights may have changed since something else was computed with them
        if self._buffers is not None and self._broadcasts_buffers:
            self._buffers.broadcast()
        # As DistributedDataParallel's require_forward_param_sync: whether this step syncs gradients decides whether
        # the next one broadcasts buffers.
        self._broadcasts_buffers = torch.is_grad_enabled() and self._syncs_gradients
        versions = self._unsharded_versions()
        modules_in_step.add(self._module)
        try:
            measures = self.activations.measures and torch.is_grad_enabled()
            with explained_errors(self._module), self.activations.step() if measures else NOTHING:
                yield
        finally:
            modules_in_step.discard(self._module)
        self._refuse_writes(versions)
        if not torch.is_grad_enabled():
            self.reshard()

    def _unsharded_versions(self) -> dict[int, int]:
        found = [
            unsharded for module in self._fsdp_modules for _, unsharded in sharded_and_unsharded_parameters(module)
        ]
        return {id(unsharded): unsharded_version(unsharded) for unsharded in found}

    def _refuse_writes(self, before: dict[int, int]) -> None:
        for module in self._fsdp_modules:
            for sharded, unsharded in sharded_and_unsharded_parameters(module):
                if unsharded_version(unsharded) != before.get(id(unsharded), unsharded_version(unsharded)):
                    names = {id(parameter): name for name, parameter in self._module.named_parameters()}
                    name = names.get(id(sharded)) or names.get(id(unsharded_parameter(unsharded)), "a weight")
                    raise UnsupportedError(
                        f"a step has written to '{name}' while it was gathered (an average of weights, max_norm), and "
                        "the write is lost when it is freed. Write between steps, in on_train_batch_end for example, "
                        "where each rank writes its shard; or use strategy='ddp_tuned'."
                    )

    def reshard(self) -> None:
        """Free what is gathered, so that the module's parameters are the shards."""
        for module in self._fsdp_modules:
            module.reshard()
            if self._prefetches:
                drop_gathered_ahead(module)

    @contextmanager
    def optimizer_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Around an optimizer's step, over sharded and replicated parameters; frees gathered ones, which are stale."""
        with uniform_groups(optimizer), explained_errors(self._module):
            yield
        self.reshard()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around backward. Collective, unless gradients accumulate: averages those of replicated parameters."""
        with explained_errors(self._module):
            yield
        if self._syncs_gradients:
            self._replicated.average_gradients()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients accumulate on each rank inside of the context."""
        self._set_sync(False)
        try:
            yield
        finally:
            self._set_sync(True)

    def _set_sync(self, syncs: bool) -> None:
        self._syncs_gradients = syncs
        for module in self._fsdp_modules:
            module.set_requires_gradient_sync(syncs, recurse=False)

    def teardown(self) -> None:
        """Stop broadcasting buffers, restore the optimizers' zero_grad, and leave nothing gathered."""
        self._buffers = None
        while self._undo:
            self._undo.pop()()
        self.reshard()


def _zero_unreduced_too(optimizer: Optimizer, module: nn.Module) -> Callable[[], None]:
    """Let zero_grad drop gradients that accumulate without a sync too; return an undo.

    fully_shard keeps those on its own unsharded parameters, which the optimizer does not know.
    """
    zero_grad = optimizer.zero_grad

    def zero_all(set_to_none: bool = True) -> None:
        zero_grad(set_to_none=set_to_none)
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for fsdp_module in fsdp_modules(module):
            for sharded, unsharded in sharded_and_unsharded_parameters(fsdp_module):
                if id(sharded) in mine:
                    drop_unreduced_gradient(unsharded)

    optimizer.zero_grad = zero_all  # type: ignore[method-assign]  # on the instance: the class's stays as it is

    def undo() -> None:
        del optimizer.zero_grad

    return undo


def full_value(value: Any) -> Any:
    """Collective for a DTensor, a norm of sharded weights for example. Return it as a full tensor."""
    return value.full_tensor() if isinstance(value, DTensor) else value
