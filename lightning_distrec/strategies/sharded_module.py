"""What a strategy does about a module, or the part of one without tables, that is fully sharded."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from lightning_distrec._compat import tell_device
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.strategies.blocks import choose_blocks
from lightning_distrec.strategies.buffers import QuietBuffers, SentBuffers
from lightning_distrec.strategies.fsdp_options import FSDPOptions
from lightning_distrec.strategies.fsdp_refusals import (
    compute_dtype,
    explained,
    num_replicas,
    refuse_module,
    refuse_offload,
)
from lightning_distrec.strategies.fully_sharded import Sharding, free_gathered, make_mesh, sharded_parts
from lightning_distrec.strategies.recompute import recompute
from lightning_distrec.strategies.sharded_copy import STEPS, gather_for_steps
from lightning_distrec.strategies.whole_parameters import WholeParameters, kept_whole, say_kept_whole


class ShardedModule:
    """Cuts a module as the options say, and is told of its steps. The module stays cut between runs."""

    def __init__(self, options: FSDPOptions) -> None:
        self._options = options
        self._mesh: DeviceMesh | None = None
        self._module: nn.Module | None = None
        self._whole = WholeParameters()
        self._sent: SentBuffers | None = None
        self._sends_gradients = True

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

        Raises ConfigError, UnsupportedError on every rank: it cannot be cut so.
        """
        dtype = compute_dtype(precision)
        if not isinstance(module, FSDPModule):
            blocks = ranks.all_or_none("setup", lambda: self._blocks(module))
            whole = kept_whole(module, blocks, module.automatic_optimization)
            say_kept_whole(whole, rank_zero_info)
            if self._options.recompute_activations:
                recompute(blocks)
            options = self._options
            sharding = Sharding(self.mesh, device, options.reshard_after_forward, dtype, options.cpu_offload)
            sharding.shard(module, blocks, set(whole.values()))
            gather_for_steps(module, [step for step in STEPS if is_overridden(step, module)])
        tell_device(module, device, self.mesh)
        self._module = module
        self._whole = WholeParameters(module)

    def _blocks(self, module: nn.Module) -> list[nn.Module]:
        refuse_module(module)
        return choose_blocks(module, self._options.wrap, self._options.min_num_parameters)

    def begin_training(self, module: nn.Module, ranks: Consensus) -> QuietBuffers:
        """Send rank 0's buffers before each step from now on, while they change."""
        self._sent = SentBuffers(module)
        return QuietBuffers(self._sent, ranks.carried, rank_zero_info)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step of any kind. Collective where buffers are sent."""
        assert self._module is not None
        self.free()  # weights may have changed since something else was computed with them
        if self._sent is not None:
            self._sent.send()
        with explained(self._module):
            yield
        if not torch.is_grad_enabled():
            self.free()

    def free(self) -> None:
        """Free what is gathered, so that the module's parameters are those of the ranks."""
        if self._module is not None:
            free_gathered(self._module)

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
        assert self._module is not None
        for part in sharded_parts(self._module):
            part.set_requires_gradient_sync(sends, recurse=False)

    def after_backward(self) -> None:
        """Collective, unless gradients are added up. Average the gradients of what every rank has whole."""
        if self._sends_gradients:
            self._whole.average()

    def end_run(self) -> None:
        """Send no more buffers."""
        self._sent = None

    def release(self) -> None:
        """Let go of the module, before the process ends."""
        self._module, self._whole, self._sent = None, WholeParameters(), None
