"""`Trainer(strategy="fsdp_tuned")`: the parameters of an unchanged module cut over the ranks, by torch's FSDP2."""

from typing import Any, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from lightning_distrec._compat.lightning import set_device_and_mesh, wrapped_optimizers
from lightning_distrec.checkpoint.options import CheckpointOptions
from lightning_distrec.pipeline.even_batches import UnevenInputs
from lightning_distrec.strategies.fully_sharded.fsdp_options import FSDPOptions
from lightning_distrec.strategies.fully_sharded.fully_sharded_module import drop_unfinished_step, shard_module
from lightning_distrec.strategies.fully_sharded.hooks import ShardedHooks
from lightning_distrec.strategies.fully_sharded.mesh import make_mesh
from lightning_distrec.strategies.fully_sharded.refusals import refuse_optimizers
from lightning_distrec.strategies.run.lightning_callbacks import adapt_callbacks
from lightning_distrec.strategies.run.precision import GlobalClipping, MatmulPrecision
from lightning_distrec.strategies.run.stopping import StopOptions


class TunedFSDPStrategy(ShardedHooks):
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
        activation_checkpointing: whether blocks keep no activations for backward, but run their forward once more.
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
        activation_checkpointing: bool = False,
        cpu_offload: bool = False,
        uneven_inputs: UnevenInputs = "stop",
        checkpoint: CheckpointOptions | dict[str, Any] | None = None,
        stopping: StopOptions | dict[str, Any] | None = None,
        process_group_backend: str | None = None,
        float32_matmul_precision: MatmulPrecision | None = None,
        timeout_seconds: float = 1800.0,
        watchdog_seconds: float = 30.0,
    ) -> None:
        self._fsdp_options = FSDPOptions(
            wrap=wrap,
            min_num_parameters=min_num_parameters,
            replicas=replicas,
            reshard_after_forward=reshard_after_forward,
            activation_checkpointing=activation_checkpointing,
            cpu_offload=cpu_offload,
        )
        self._mesh: DeviceMesh | None = None
        self._clipping = GlobalClipping()
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
        """The ranks: (data_parallel,), or (replicate, shard). `self.device_mesh` is that too, in configure_model."""
        if self._mesh is None:  # as in Lightning's ModelParallelStrategy
            raise RuntimeError("Accessing the device mesh before processes have initialized is not allowed.")
        return self._mesh

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        assert self._consensus is not None
        ranks_on_node = self._consensus.all_gather(self.num_local_ranks)
        if self._mesh is None:  # one for all runs: parameters that stay sharded between them are on it
            self._mesh = make_mesh(self._fsdp_options, self.root_device, ranks_on_node, self._waits)
        assert self.lightning_module is not None
        set_device_and_mesh(self.lightning_module, self.lightning_module.device, self.device_mesh)

    @override
    def set_up_module(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        assert self.accelerator is not None
        assert self._consensus is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        if fitting and self._layer_sync:
            self._layer_sync.apply(module)
        drop_unfinished_step(module)
        self.precision_plugin.convert_module(module)
        self._sharded = shard_module(
            module, self._fsdp_options, self.device_mesh, self.root_device, str(trainer.precision), self._consensus
        )
        self.model = module
        if fitting:
            self.setup_optimizers(trainer)
            refuse_optimizers(self.optimizers, module)
            self._clipping.put_on(self.precision_plugin, None, [])
            adapt_callbacks(trainer, module, None, self.lightning_module_state_dict)
        self.setup_precision_plugin()
        if fitting:
            optimizers = [*self.optimizers, *wrapped_optimizers(self)]  # the plugin has the last word about them
            self._buffers = self._sharded.begin_training(optimizers, self._consensus)
        self.begin_checkpoints(module, None)

    @override
    def exchanged_parameters(self) -> list[nn.Parameter]:
        return []  # FSDP2 exchanges the gradients of whatever learns

    @override
    def end_run(self) -> None:
        """Leave the module as it is, where it is: sharded, for the next run."""
        self._clipping.take_off()
        self.end_sharded()
        self.stop_listening()
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
