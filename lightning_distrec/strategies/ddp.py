"""`Trainer(strategy="ddp_tuned")`: DistributedDataParallel with settings that suit the module."""

from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer
from typing_extensions import Unpack, override

from lightning_distrec.errors import ConfigError
from lightning_distrec.option_values import as_options
from lightning_distrec.strategies.data_parallel.activations import (
    ActivationCheckpointing,
    CheckpointedLayers,
)
from lightning_distrec.strategies.data_parallel.gradient_exchange import (
    CommDtype,
    GradientExchange,
    PowerSGD,
    PowerSGDOptions,
    SparseGrads,
    refuse_debug_detail,
    refuse_gradients,
    refuse_powersgd,
)
from lightning_distrec.strategies.data_parallel.replicated_layers import (
    BroadcastSkipper,
    NoBroadcasts,
)
from lightning_distrec.strategies.fully_sharded.shards import (
    refuse_absent,
    refuse_sharded,
    refuse_sharded_tables,
)
from lightning_distrec.strategies.run.run import Run
from lightning_distrec.strategies.run.strategy import DistRecStrategy
from lightning_distrec.strategies.run.strategy_arguments import (
    RunOptions,
    any_at_run_time,
    check_arguments,
)


@dataclass(kw_only=True)
class DDPRun(Run):
    """What ddp_tuned has during one run."""

    compression: PowerSGD | None = None
    """Compresses gradients; None: they are sent as they are."""
    activations: CheckpointedLayers = field(init=False)
    """The layers that recompute their activations."""


class TunedDDPStrategy(DistRecStrategy[DDPRun]):
    """Trains an unchanged LightningModule as Lightning's "ddp" does: same numbers, fewer copies and
    broadcasts.

    Gradients are views into DDP's buckets, and buffers are not broadcast while none of them
    changes. Checkpoints, stopping, requeueing and the watchdog are those of
    TorchRecShardedStrategy.

    Args:
        bucket_cap_mb: size of DDP's gradient buckets in MiB.
        comm_dtype: the type in which gradients are sent and added up: "fp32", or "bf16" or "fp16",
            which halve the bytes and give other numbers.
        powersgd: matrix_rank, start_step: send gradients as products of two matrices, which is many
            times fewer bytes, and inexact; see PowerSGDOptions.
        activation_checkpointing: layers that recompute their activations in backward; same numbers.
            true: all layers of parts that repeat, like a transformer's; or a list of class names
            and paths.
        find_unused_parameters: as in DDP, for layers that some steps do not use.
        static_graph: as in DDP, for a module every step of which uses the same layers alike.
        sparse_grads: how gradients of nn.Embedding(sparse=True) are sent over gloo: "sparse", as
            rows; "dense", as dense tensors, which become sparse gradients of the looked up rows
            again.
        run_options: what all strategies take, as checkpoint and stopping: see DistRecStrategy.
    """

    strategy_name = "ddp_tuned"
    predicts_alone = True

    @any_at_run_time
    def __init__(
        self,
        bucket_cap_mb: float = 25.0,
        comm_dtype: CommDtype = "fp32",
        powersgd: PowerSGDOptions | dict[str, Any] | None = None,
        activation_checkpointing: ActivationCheckpointing = False,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        sparse_grads: SparseGrads = "sparse",
        **run_options: Unpack[RunOptions],
    ) -> None:
        check_arguments(TunedDDPStrategy, locals())
        if powersgd is not None and comm_dtype != "fp32":
            raise ConfigError(
                f"powersgd and comm_dtype={comm_dtype!r} both say how gradients are sent. Set one."
            )
        if powersgd is not None and static_graph:
            raise ConfigError(
                "powersgd with static_graph=True: DDP would order gradients again after the first "
                "step, and lose what the compression has left over. Set one."
            )
        self._powersgd = (
            None if powersgd is None else as_options("powersgd", PowerSGDOptions, powersgd)
        )
        self.gradient_exchange = GradientExchange(
            bucket_cap_mb=bucket_cap_mb,
            comm_dtype=comm_dtype,
            sparse_grads=sparse_grads,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
        )
        self._checkpointed = activation_checkpointing
        super().__init__(**run_options)

    # -- Lightning's hooks in the order in which it calls them; those of all strategies are in
    # run/strategy.py

    @override
    def setup(self, trainer: Trainer) -> None:
        run = self.begin_run(trainer, DDPRun)
        refuse_absent(run.module, self.strategy_name)
        # A module that an earlier run has sharded would be trained as if each rank's shard were all
        # of it.
        refuse_sharded(run.module, "ddp_tuned")
        if run.is_fitting:  # looked up alone, they have the numbers of torchrec_sharded
            refuse_sharded_tables(run.module, "ddp_tuned")
        refuse_gradients(run.module, self.gradient_exchange.comm_dtype, dist.get_backend())
        trains_with_others = run.is_fitting and self.world_size > 1
        checkpointed = self._checkpointed if run.is_fitting else False
        run.activations = CheckpointedLayers(run.module, checkpointed)
        run.undo.callback(run.activations.undo)
        if trains_with_others and self._powersgd is not None:
            refuse_powersgd(run.module, str(trainer.precision))
            # Before DDP wraps the module: the hook is registered with the wrapper, once.
            run.compression = PowerSGD(
                run.module, self._powersgd, self.gradient_exchange.bucket_cap_mb
            )
            run.session.checkpoints.positions.keep_rank_state("powersgd", run.compression)
        super().setup(trainer)
        self.begin_checkpoints(run)

    @override
    def configure_ddp(self) -> None:
        """Collective, in setup, and in a run when layers unfreeze. Wrap the module in DDP."""
        refuse_debug_detail()
        run = self.run
        is_first = self.model is run.module
        run.buffers.stop()
        # the last references: an old wrapper's hooks go with it
        run.buffers = NoBroadcasts()
        self.model = run.module
        # Wrapped again in the middle of a run too: DDP decides at construction which parameters it
        # averages.
        device_ids = self.determine_ddp_device_ids()
        ddp = self.gradient_exchange.wrap(run.module, device_ids, is_first, run.compression)
        self.model = ddp
        run.buffers = BroadcastSkipper(ddp, run.session.consensus.flags)
        run.frozen = [
            parameter for parameter in run.module.parameters() if not parameter.requires_grad
        ]
