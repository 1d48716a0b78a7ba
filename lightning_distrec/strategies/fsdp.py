"""`Trainer(strategy="fsdp_tuned")`: the parameters of an unchanged module cut over the ranks, by torch's FSDP2."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from typing_extensions import override

from lightning_distrec.checkpoint.options import CheckpointOptions
from lightning_distrec.errors import ConfigError
from lightning_distrec.optimizers.mixed_groups import unmixed_groups
from lightning_distrec.pipeline.even_batches import UnevenInputs
from lightning_distrec.strategies.blocks import choose_blocks
from lightning_distrec.strategies.buffers import QuietBuffers, SentBuffers
from lightning_distrec.strategies.fsdp_refusals import (
    check_replicas,
    compute_dtype,
    explained,
    refuse_module,
    refuse_offload,
    refuse_optimizers,
)
from lightning_distrec.strategies.fully_sharded import Sharding, free_gathered, make_mesh, sharded_parts
from lightning_distrec.strategies.lightning_callbacks import adapt_callbacks
from lightning_distrec.strategies.precision import GlobalClipping, MatmulPrecision
from lightning_distrec.strategies.recompute import recompute
from lightning_distrec.strategies.sharded_copy import STEPS, gather_for_steps
from lightning_distrec.strategies.stopping import StopOptions
from lightning_distrec.strategies.together import RanksTogether
from lightning_distrec.strategies.whole_parameters import WholeParameters, kept_whole, say_kept_whole


class TunedFSDPStrategy(RanksTogether):
    """Trains an unchanged LightningModule with parameters, gradients and optimizer state cut over the ranks.

    Each rank keeps a part of everything, and gathers a block's parameters while it computes with them: memory per rank
    shrinks with the number of ranks, and the numbers are those of `ddp`. Checkpoints, stopping and requeueing, and what
    is said of dead ranks, are those of TorchRecShardedStrategy. Source: torch.distributed.fsdp.fully_shard.

    Args:
        wrap: the blocks, each gathered and freed as one. "auto": of at least `min_num_parameters`, the parts that stand
            beside others of their kind and shapes, as a transformer's layers do, and single layers; or a list of
            classes' names, and of paths in the module. What is in no block is gathered for a whole step.
        min_num_parameters: see wrap.
        replicas: so many copies of the parameters, each cut over the ranks that follow each other (HSDP); "nodes": one
            on each node, so that parameters travel within nodes, and gradients' sums between them.
        reshard_after_forward: whether a block's parameters are freed after forward, and gathered again for backward.
            "auto": those of all blocks but the last.
        recompute_activations: whether blocks keep no activations for backward, but run their forward once more.
        cpu_offload: whether parameters, gradients and optimizer state stay on the host (CUDA).
        uneven_inputs: when ranks have unequal numbers of batches, "stop" after the last that all have, or "error".
        checkpoint: distributed, async_save, start_from, rename: see CheckpointOptions.
        stopping: auto_requeue, requeue_signal, on_sigterm, resume: see StopOptions.
        process_group_backend: "gloo" or "nccl"; None takes the device's.
        float32_matmul_precision: "high" computes float32 products in TF32, "medium" in bfloat16, where the device can;
            "highest" in float32. None leaves torch's setting as it is.
        timeout_seconds: how long a rank waits for the others in any exchange.
        watchdog_seconds: after so long a rank that has been stopped, or is not heard of, ends the others, which name
            it; one whose process has ended does at once. 0: nobody watches.
    """

    strategy_name = "fsdp_tuned"

    def __init__(
        self,
        wrap: Literal["auto"] | list[str] = "auto",
        min_num_parameters: int = 1_000_000,
        replicas: int | Literal["nodes"] = 1,
        reshard_after_forward: Literal["auto"] | bool = "auto",
        recompute_activations: bool = False,
        cpu_offload: bool = False,
        uneven_inputs: UnevenInputs = "stop",
        checkpoint: CheckpointOptions | dict[str, Any] | None = None,
        stopping: StopOptions | dict[str, Any] | None = None,
        process_group_backend: str | None = None,
        float32_matmul_precision: MatmulPrecision | None = None,
        timeout_seconds: float = 1800.0,
        watchdog_seconds: float = 30.0,
    ) -> None:
        if isinstance(wrap, str) and wrap != "auto":
            raise ConfigError(f"wrap={wrap!r}: must be 'auto', or a list of classes' names and of paths: [{wrap!r}].")
        if min_num_parameters < 1:
            raise ConfigError(f"min_num_parameters={min_num_parameters}: must be at least 1.")
        if reshard_after_forward not in ("auto", True, False):
            raise ConfigError(f"reshard_after_forward={reshard_after_forward!r}: must be 'auto', true or false.")
        if replicas != "nodes" and (isinstance(replicas, str) or replicas < 1):
            raise ConfigError(f"replicas={replicas!r}: must be 'nodes', or at least 1.")
        self._wrap: Literal["auto"] | list[str] = wrap
        self._min_num_parameters = min_num_parameters
        self._replicas: int | Literal["nodes"] = replicas
        self._reshard: Literal["auto"] | bool = reshard_after_forward
        self._recompute = recompute_activations
        self._cpu_offload = cpu_offload
        self._mesh: DeviceMesh | None = None
        self._blocks: list[nn.Module] = []
        self._whole = WholeParameters()
        self._sent: SentBuffers | None = None
        self._clipping = GlobalClipping()
        self._sends_gradients = True
        super().__init__(
            uneven_inputs=uneven_inputs,
            checkpoint=checkpoint,
            stopping=stopping,
            process_group_backend=process_group_backend,
            float32_matmul_precision=float32_matmul_precision,
            timeout_seconds=timeout_seconds,
            watchdog_seconds=watchdog_seconds,
        )

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks: (shard,), or (replicate, shard)."""
        assert self._mesh is not None
        return self._mesh

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        refuse_offload(self._cpu_offload, self.root_device)
        replicas = self.num_nodes if self._replicas == "nodes" else self._replicas
        check_replicas(replicas, self.world_size)
        if self._mesh is None:
            self._mesh = make_mesh(self.root_device.type, self.world_size, replicas, self._waits)

    @override
    def set_up_module(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        assert self.accelerator is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        if fitting and self._layer_sync:
            self._layer_sync.apply(module)
        self.precision_plugin.convert_module(module)
        self._shard(module, compute_dtype(str(trainer.precision)))
        self.model = module
        if fitting:
            self.setup_optimizers(trainer)
            refuse_optimizers(self.optimizers, module)
            self._sent = SentBuffers(module)
            assert self._consensus is not None
            self._buffers = QuietBuffers(self._sent, self._consensus.carried, rank_zero_info)
            adapt_callbacks(trainer, module, None, self.lightning_module_state_dict)
        self.setup_precision_plugin()
        self._clipping.put_on(self.precision_plugin, None, [])
        self.begin_checkpoints(module, None)

    def _shard(self, module: LightningModule, dtype: torch.dtype | None) -> None:
        """Collective. Cut the module, unless a run before has."""
        if not isinstance(module, FSDPModule):
            assert self._consensus is not None
            self._blocks = self._consensus.all_or_none("setup", lambda: self._chosen_blocks(module))
            whole = kept_whole(module, self._blocks, module.automatic_optimization)
            say_kept_whole(whole, rank_zero_info)
            if self._recompute:
                recompute(self._blocks)
            sharding = Sharding(self.device_mesh, self.root_device, self._reshard, dtype, self._cpu_offload)
            sharding.shard(module, self._blocks, set(whole.values()))
            gather_for_steps(module, [step for step in STEPS if is_overridden(step, module)])
        self._whole = WholeParameters(module)

    @override
    def exchanged_parameters(self) -> list[nn.Parameter]:
        return []

    def _chosen_blocks(self, module: nn.Module) -> list[nn.Module]:
        refuse_module(module)
        return choose_blocks(module, self._wrap, self._min_num_parameters)

    @contextmanager
    @override
    def around_step(self, args: tuple[Any, ...], has_backward: bool) -> Iterator[None]:
        assert self.lightning_module is not None
        free_gathered(self.lightning_module)  # weights may have changed since something else was computed with them
        if self._sent is not None:
            self._sent.send()
        with explained(self.lightning_module):
            yield
        if not has_backward and not torch.is_grad_enabled():
            free_gathered(self.lightning_module)

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        """Let gradients add up on each rank, without an exchange."""
        self._set_sends_gradients(False)
        try:
            yield
        finally:
            self._set_sends_gradients(True)

    def _set_sends_gradients(self, sends: bool) -> None:
        self._sends_gradients = sends
        for part in sharded_parts(self.model) if self.model is not None else []:
            part.set_requires_gradient_sync(sends, recurse=False)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if self._sends_gradients:
            self._whole.average()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        with unmixed_groups(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        free_gathered(self.lightning_module)
        return super().lightning_module_state_dict()

    @override
    def end_run(self) -> None:
        """Leave the module as it is, where it is: sharded, for the next run."""
        self._clipping.take_off()
        self._sent = None
        self.stop_listening()
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
