"""`Trainer(strategy="fsdp_tuned")`: the parameters of an unchanged module, sharded over the ranks
by torch's FSDP2."""

from collections.abc import Mapping
from typing import Any, Literal

from lightning.pytorch import Trainer
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import Unpack, override

from lightning_distrec._compat.lightning import set_device_and_mesh, wrapped_optimizers
from lightning_distrec.strategies.data_parallel.activations import ActivationCheckpointing
from lightning_distrec.strategies.fully_sharded.fsdp_options import Dtype, FSDPOptions, make_mesh
from lightning_distrec.strategies.fully_sharded.fully_sharded_module import FullyShardedModule
from lightning_distrec.strategies.fully_sharded.shard_blocks import shard_module
from lightning_distrec.strategies.fully_sharded.shards import (
    drop_unfinished_step,
    refuse_absent,
    refuse_optimizers,
    refuse_sharded_tables,
    unshard_module,
)
from lightning_distrec.strategies.run.lightning_callbacks import adapt_callbacks
from lightning_distrec.strategies.run.precision import (
    clip_over_all_ranks,
    skip_overflows_on_all_ranks,
)
from lightning_distrec.strategies.run.run import Run
from lightning_distrec.strategies.run.strategy import DistRecStrategy
from lightning_distrec.strategies.run.strategy_arguments import (
    RunOptions,
    any_at_run_time,
    check_arguments,
)


class TunedFSDPStrategy(DistRecStrategy[Run]):
    """Trains an unchanged LightningModule with parameters, gradients and optimizer state sharded
    over the ranks.

    Each rank keeps a shard of every parameter, and gathers a block's parameters while it computes
    with them: memory per rank shrinks with the number of ranks, and the numbers are those of `ddp`.
    Checkpoints, stopping, requeueing and the watchdog are those of TorchRecShardedStrategy. Source:
    torch.distributed.fsdp.fully_shard.

    Args:
        wrap: blocks, each gathered and freed as one. "auto": submodules of at least
            `min_num_parameters` that repeat (siblings of one class and shapes, like a transformer's
            layers) or are single layers; or a list of class names, and of paths in the module.
            What is in no block is gathered for a whole step.
        min_num_parameters: minimum number of parameters of a block with wrap="auto".
        replicas: number of copies of the parameters, each sharded over consecutive ranks (HSDP);
            "nodes": one on each node, so that parameters are gathered within nodes, and gradients
            are summed between them.
        reshard_after_forward: whether to free a block's parameters after forward, and gather them
            again for backward. "auto": for all blocks but the last.
        activation_checkpointing: layers that recompute their activations in backward instead of
            keeping them: true for the blocks, or a list of class names and paths.
        param_dtype: "fp32", "bf16" or "fp16": type in which parameters are gathered. None: the
            precision's. With precision="32-true", blocks compute in it: they cast their inputs to
            it, and their outputs back.
        reduce_dtype: type in which gradients are sent and summed. None: float32, or that of a true
            precision.
        offload: keep parameters, gradients and optimizer state on the host, and update there
            (CPUOffloadPolicy).
        run_options: what all strategies take, as checkpoint and stopping: see DistRecStrategy.
    """

    strategy_name = "fsdp_tuned"

    @any_at_run_time
    def __init__(
        self,
        wrap: Literal["auto"] | list[str] = "auto",
        min_num_parameters: int = 1_000_000,
        replicas: int | Literal["nodes"] = 1,
        reshard_after_forward: Literal["auto"] | bool = "auto",
        activation_checkpointing: ActivationCheckpointing = False,
        param_dtype: Dtype | None = None,
        reduce_dtype: Dtype | None = None,
        offload: bool = False,
        **run_options: Unpack[RunOptions],
    ) -> None:
        check_arguments(TunedFSDPStrategy, locals())
        self._fsdp_options = FSDPOptions(
            wrap=wrap,
            min_num_parameters=min_num_parameters,
            replicas=replicas,
            reshard_after_forward=reshard_after_forward,
            activation_checkpointing=activation_checkpointing,
            param_dtype=param_dtype,
            reduce_dtype=reduce_dtype,
            offload=offload,
        )
        self._mesh: DeviceMesh | None = None
        super().__init__(**run_options)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks: (data_parallel,) or (replicate, shard); `self.device_mesh` in configure_model
        is that too."""
        if self._mesh is None:  # as in Lightning's ModelParallelStrategy
            raise RuntimeError(
                "Accessing the device mesh before processes have initialized is not allowed."
            )
        return self._mesh

    # -- Lightning's hooks in the order in which it calls them; those of all strategies are in
    # run/strategy.py

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        # one for all runs: parameters that stay sharded between them are on it
        if self._mesh is None:
            self._mesh = make_mesh(
                self._fsdp_options, self.root_device, self.session.nodes.local_sizes, self._wait
            )
        set_device_and_mesh(self.module, self.module.device, self._mesh)

    @override
    def setup(self, trainer: Trainer) -> None:
        run = self.begin_run(trainer, Run)
        refuse_absent(run.module, self.strategy_name)
        refuse_sharded_tables(run.module, self.strategy_name)
        module = run.module
        consensus = run.session.consensus
        trainer.accelerator.setup(trainer)
        if run.is_fitting and self._layer_sync:
            self._layer_sync.apply(module)
        # A run that failed in a step may have left parameters gathered, which would be sharded as
        # they are.
        drop_unfinished_step(module)
        # Before sharding: fully_shard groups parameters by their types, and gathers one type at a
        # time.
        self.precision_plugin.convert_module(module)
        options = self._fsdp_options
        mesh = self.device_mesh
        precision = str(trainer.precision)
        shard_module(module, options, mesh, self.root_device, precision, consensus)
        run.dense = sharded = FullyShardedModule(module, options, consensus)
        run.undo.callback(sharded.teardown)
        self.model = module
        if run.is_fitting:
            # After sharding, which puts DTensors in the place of the parameters: optimizers must
            # hold those.
            self.setup_optimizers(trainer)
            refuse_optimizers(self.optimizers, module)
            run.undo.enter_context(clip_over_all_ranks(self.precision_plugin, None, {}))
            run.undo.callback(skip_overflows_on_all_ranks(self.precision_plugin, self.optimizers))
            adapt_callbacks(trainer, module, self.lightning_module_state_dict)
        self.setup_precision_plugin()
        if run.is_fitting:
            # the plugin may have replaced them
            optimizers = [*self.optimizers, *wrapped_optimizers(self)]
            run.buffers = sharded.begin_training(optimizers, consensus)
        self.begin_checkpoints(run)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # Lightning's Tuner loads after a step that has failed, which leaves parameters gathered.
        drop_unfinished_step(self.module)
        super().load_model_state_dict(checkpoint, strict)

    @override
    def put_weights_back(self, full: dict[str, Tensor]) -> None:
        unshard_module(self.module, full)
