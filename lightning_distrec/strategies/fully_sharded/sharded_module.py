"""What a strategy does about a module, or the part of one without tables, that is fully sharded."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
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
    drop_unreduced_gradient,
    reset_after_failure,
    unsharded_parameter,
    unsharded_parameters,
    unsharded_version,
)
from lightning_distrec._compat.lightning import set_device_and_mesh
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import ConfigError, UnsupportedError
from lightning_distrec.optimizers.mixed_groups import uniform_groups
from lightning_distrec.strategies.fully_sharded.activation_checkpointing import checkpoint_activations
from lightning_distrec.strategies.fully_sharded.blocks import choose_blocks
from lightning_distrec.strategies.fully_sharded.deep_copy import STEPS, gather_for_steps
from lightning_distrec.strategies.fully_sharded.fsdp_options import FSDPOptions
from lightning_distrec.strategies.fully_sharded.refusals import (
    compute_dtype,
    explained,
    num_replicas,
    refuse_module,
    refuse_offload,
    refuse_types,
)
from lightning_distrec.strategies.fully_sharded.replicated_parameters import (
    ReplicatedParameters,
    choose_replicated,
    log_replicated,
)
from lightning_distrec.strategies.fully_sharded.shard_blocks import Sharding, make_mesh, sharded_parts
from lightning_distrec.strategies.run.buffers import QuietBuffers, SentBuffers


class ShardedModule:
    """Cuts a module as the options say, and is told of its steps. The module stays cut between runs."""

    def __init__(self, options: FSDPOptions) -> None:
        self._options = options
        self._mesh: DeviceMesh | None = None
        self._module: nn.Module | None = None
        self._parts: list[FSDPModule] = []
        """What was cut of it, each by itself."""
        self._whole = ReplicatedParameters()
        self._sent: SentBuffers | None = None
        self._sends_buffers = self._sends_gradients = True
        self._undo: list[Callable[[], None]] = []

    @property
    def mesh(self) -> DeviceMesh:
        """The ranks: (data_parallel,), or (replicate, shard)."""
        assert self._mesh is not None
        return self._mesh

    def meet(self, device: torch.device, on_node: list[int], timeout: timedelta) -> None:
        """Collective. Find the ranks that share each copy of the parameters.

        on_node: for each rank, how many are on its node. Raises ConfigError: they cannot be shared out so.
        """
        refuse_offload(self._options.cpu_offload, device)
        replicas = num_replicas(self._options.replicas, on_node)
        if self._mesh is None:
            self._mesh = make_mesh(device.type, len(on_node), replicas, timeout)

    def set_up(self, module: LightningModule, precision: str, device: torch.device, ranks: Consensus) -> None:
        """Collective. Cut the module, with rank 0's weights, unless a run before has; begin a run.

        Raises ConfigError, UnsupportedError on every rank: it cannot be cut so, or was cut otherwise.
        """
        dtype = compute_dtype(precision)
        if not isinstance(module, FSDPModule):
            blocks = ranks.all_or_none("setup", lambda: self._blocks(module))
            whole = choose_replicated(module, blocks, module.automatic_optimization)
            log_replicated(whole, rank_zero_info)
            if self._options.activation_checkpointing:
                checkpoint_activations(blocks)
            options = self._options
            sharding = Sharding(self.mesh, device, options.reshard_after_forward, dtype, options.cpu_offload)
            sharding.shard(module, blocks, set(whole.values()))
            gather_for_steps(module, [step for step in STEPS if is_overridden(step, module)])
            _cut_as[module] = self._options, dtype
        elif (was := _cut_as.get(module, (self._options, dtype))) != (self._options, dtype):
            raise ConfigError(
                f"an earlier run has cut this module as {was[0]}, computing in {was[1] or 'its own type'}; now it is "
                f"{self._options}, in {dtype or 'its own type'}, and a module stays as it was cut. Give the strategy "
                "the same options and precision, or build a new module and load a checkpoint into it."
            )
        set_device_and_mesh(module, device, self.mesh)
        self._module, self._parts = module, sharded_parts(module)
        self._whole = ReplicatedParameters(module)

    def _blocks(self, module: nn.Module) -> list[nn.Module]:
        refuse_module(module)
        blocks = choose_blocks(module, self._options.wrap, self._options.min_num_parameters)
        paths = {id(part): path for path, part in module.named_modules()}
        inside = {id(parameter) for block in blocks for parameter in block.parameters()}
        rest = [(name, p) for name, p in module.named_parameters() if id(p) not in inside]
        refuse_types([(paths[id(block)], list(block.named_parameters())) for block in blocks] + [("", rest)])
        return blocks

    def begin(self, module: nn.Module) -> None:
        """Before optimizers are made: drop what another run, which may have failed, has left gathered or unsent."""
        if isinstance(module, FSDPModule):
            reset_after_failure(module)
        for part in sharded_parts(module):
            part.reshard()
            for _, gathered in unsharded_parameters(part):
                drop_unreduced_gradient(gathered)
        self._sends_buffers = self._sends_gradients = True

    def begin_training(self, module: nn.Module, optimizers: Iterable[Optimizer], ranks: Consensus) -> QuietBuffers:
        """Send rank 0's buffers before steps from now on, while they change; let zero_grad reach unsent gradients."""
        self._sent = SentBuffers(module)
        self._undo += [_zero_unsent_too(optimizer, module) for optimizer in optimizers]
        return QuietBuffers(self._sent, ranks.flags, rank_zero_info)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step of any kind. Collective where buffers are sent.

        Raises UnsupportedError: the step has written to weights while they were gathered.
        """
        assert self._module is not None
        self.free()  # weights may have changed since something else was computed with them
        if self._sent is not None and self._sends_buffers:
            self._sent.send()
        # As DistributedDataParallel's require_forward_param_sync: the next forward's broadcast goes by this one.
        self._sends_buffers = torch.is_grad_enabled() and self._sends_gradients
        writes = self._writes()
        module: Any = self._module
        module.in_step_of_strategy = True
        try:
            with explained(self._module):
                yield
        finally:
            module.in_step_of_strategy = False
        self._refuse_writes(writes)
        if not torch.is_grad_enabled():
            self.free()

    def _writes(self) -> dict[int, int]:
        found = [gathered for part in self._parts for _, gathered in unsharded_parameters(part)]
        return {id(gathered): unsharded_version(gathered) for gathered in found}

    def _refuse_writes(self, before: dict[int, int]) -> None:
        assert self._module is not None
        for part in self._parts:
            for sharded, gathered in unsharded_parameters(part):
                if unsharded_version(gathered) != before.get(id(gathered), unsharded_version(gathered)):
                    names = {id(parameter): name for name, parameter in self._module.named_parameters()}
                    name = names.get(id(sharded)) or names.get(id(unsharded_parameter(gathered)), "a weight")
                    raise UnsupportedError(
                        f"a step has written to '{name}' while it was gathered (an average of weights, max_norm), "
                        "which is lost when it is freed. Write between steps, in on_train_batch_end say, where each "
                        "rank writes its part; or use strategy='ddp_tuned'."
                    )

    def free(self) -> None:
        """Free what is gathered, so that the module's parameters are those of the ranks."""
        for part in self._parts:
            part.reshard()

    @contextmanager
    def update(self, optimizer: Optimizer) -> Iterator[None]:
        """Around an optimizer's step: its parameters may be sharded or not, and what is gathered is old afterwards."""
        assert self._module is not None
        with uniform_groups(optimizer), explained(self._module):
            yield
        self.free()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around backward. Collective, unless gradients are added up: averages those of what every rank has whole."""
        assert self._module is not None
        with explained(self._module):
            yield
        if self._sends_gradients:
            self._whole.average()

    @contextmanager
    def without_exchange(self) -> Iterator[None]:
        """Let gradients add up on each rank inside of the context."""
        self._send_gradients(False)
        try:
            yield
        finally:
            self._send_gradients(True)

    def _send_gradients(self, sends: bool) -> None:
        self._sends_gradients = sends
        for part in self._parts:
            part.set_requires_gradient_sync(sends, recurse=False)

    def end_run(self) -> None:
        """Send no more buffers, and leave nothing gathered."""
        self._sent = None
        while self._undo:
            self._undo.pop()()
        self.free()

    def release(self) -> None:
        """Let go of the module, before the process ends."""
        self._module, self._parts, self._whole, self._sent = None, [], ReplicatedParameters(), None


_cut_as: "WeakKeyDictionary[nn.Module, tuple[FSDPOptions, torch.dtype | None]]" = WeakKeyDictionary()


def _zero_unsent_too(optimizer: Optimizer, module: nn.Module) -> Callable[[], None]:
    """Let zero_grad drop gradients that were added up without an exchange, which fully_shard keeps; return an undo."""
    zero_grad = optimizer.zero_grad

    def zero_all(set_to_none: bool = True) -> None:
        zero_grad(set_to_none=set_to_none)
        mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for part in sharded_parts(module):
            for sharded, gathered in unsharded_parameters(part):
                if id(sharded) in mine:
                    drop_unreduced_gradient(gathered)

    optimizer.zero_grad = zero_all  # type: ignore[method-assign]

    def undo() -> None:
        del optimizer.zero_grad

    return undo


def as_logged(value: Any) -> Any:
    """Collective for a DTensor, a norm of sharded weights say. Return it whole."""
    return value.full_tensor() if isinstance(value, DTensor) else value
