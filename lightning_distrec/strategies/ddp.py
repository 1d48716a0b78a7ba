"""`Trainer(strategy="ddp_tuned")`: DistributedDataParallel with settings that suit the module."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_distrec.checkpoint.options import CheckpointOptions
from lightning_distrec.errors import ConfigError
from lightning_distrec.optimizers.zero_partition import ZeroPartition, refuse_to_share_out, share_out
from lightning_distrec.pipeline.even_batches import UNEVEN_INPUTS, UnevenInputs
from lightning_distrec.pipeline.joined_batches import JoinedLoader, join_loader
from lightning_distrec.strategies.data_parallel.autotune import Autotune, candidates, fingerprint, remember, remembered
from lightning_distrec.strategies.data_parallel.gradient_exchange import (
    CommDtype,
    ExchangeSetting,
    check_exchange,
    exchange_as,
    refuse_gradients,
)
from lightning_distrec.strategies.data_parallel.join import Joining, check_joining, refuse_to_join
from lightning_distrec.strategies.data_parallel.sparse_gradients import (
    AUTO_BYTES,
    TRIAL_STEPS,
    SparseGrads,
    dense_bytes_of,
    is_worth_a_trial,
    said_of,
    sparse_weights,
)
from lightning_distrec.strategies.fully_sharded.refusals import refuse_sharded
from lightning_distrec.strategies.run.buffers import QuietBuffers
from lightning_distrec.strategies.run.precision import MatmulPrecision
from lightning_distrec.strategies.run.stopping import StopOptions
from lightning_distrec.strategies.run.strategy import DistRecStrategy

JOIN_OR = (*UNEVEN_INPUTS, "join")


class TunedDDPStrategy(DistRecStrategy):
    """Trains an unchanged LightningModule as Lightning's "ddp" does, with the same numbers, and faster where it can.

    Gradients are views into DDP's buckets, and buffers that never change are not broadcast at every step. Checkpoints,
    stopping and requeueing, and what is said of dead ranks, are those of TorchRecShardedStrategy.

    Args:
        bucket_cap_mb: gradients travel in buckets of about so many MiB; "auto": as autotune_steps finds, else 25.
        comm_dtype: gradients travel, and are added up, in "bf16" or "fp16": half of the bytes, and not the same
            numbers. "fp32": as they are.
        autotune_steps: so many steps are trained with each setting of the exchange in turn, once; the one whose
            slowest rank is fastest is kept, and remembered in default_root_dir for this module on as many ranks. The
            losses are those of any setting. 0: nothing is tried.
        find_unused_parameters: as DDP's, for layers that some steps do not use.
        static_graph: as DDP's, for a module every step of which uses the same layers alike.
        sparse_grads: those of nn.Embedding(sparse=True) travel over gloo as indices and values ("sparse"), or as
            dense tensors ("dense"), from which the rows that any rank looked up become sparse gradients again. "auto":
            both are timed in the first steps, for tables of at most 16 MiB, and the one whose slowest rank is faster is
            kept.
        zero_optimizer: each parameter is updated by one rank, which alone keeps the optimizer's state of it, and sends
            it to the others; the numbers are the same. For optimizers of torch.optim that look at each parameter by
            itself.
        uneven_inputs: when ranks have unequal numbers of batches, "stop" after the last that all have, or "error"; with
            "join" a rank whose batches are over takes part in the others' steps with gradients of zero, and the
            gradients are the mean over the ranks that have a batch.
        checkpoint: distributed, async_save, start_from, rename: see CheckpointOptions.
        stopping: auto_requeue, requeue_signal, on_sigterm, resume: see StopOptions.
        process_group_backend: "gloo" or "nccl"; None takes the device's.
        float32_matmul_precision: "high" computes float32 products in TF32, "medium" in bfloat16, where the device can;
            "highest" in float32. None leaves torch's setting as it is.
        timeout_seconds: how long a rank waits for the others in any exchange.
        watchdog_seconds: after so long a rank that has been stopped, or is not heard of, ends the others, which name
            it; one whose process has ended does at once. 0: nobody watches.
    """

    strategy_name = "ddp_tuned"

    def __init__(
        self,
        bucket_cap_mb: float | Literal["auto"] = "auto",
        comm_dtype: CommDtype = "fp32",
        autotune_steps: int = 0,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        sparse_grads: SparseGrads = "auto",
        zero_optimizer: bool = False,
        uneven_inputs: UnevenInputs | Literal["join"] = "stop",
        checkpoint: CheckpointOptions | dict[str, Any] | None = None,
        stopping: StopOptions | dict[str, Any] | None = None,
        process_group_backend: str | None = None,
        float32_matmul_precision: MatmulPrecision | None = None,
        timeout_seconds: float = 1800.0,
        watchdog_seconds: float = 30.0,
    ) -> None:
        check_exchange(comm_dtype, sparse_grads)
        if bucket_cap_mb != "auto" and (isinstance(bucket_cap_mb, str) or bucket_cap_mb <= 0):
            raise ConfigError(f"bucket_cap_mb={bucket_cap_mb!r}: must be 'auto', or MiB above 0.")
        if autotune_steps < 0:
            raise ConfigError(f"autotune_steps={autotune_steps}: must not be below 0.")
        if autotune_steps and bucket_cap_mb != "auto":
            raise ConfigError(
                f"autotune_steps={autotune_steps} tries sizes of buckets, and bucket_cap_mb={bucket_cap_mb} fixes it. "
                "Leave one of them out."
            )
        cap = ExchangeSetting().bucket_cap_mb if bucket_cap_mb == "auto" else bucket_cap_mb
        self._start = self._setting = ExchangeSetting(cap, dense_bytes=dense_bytes_of(sparse_grads))
        self._sparse_grads: SparseGrads = sparse_grads
        self._comm_dtype: CommDtype = comm_dtype
        self._autotune_steps = autotune_steps
        self._autotune: Autotune | None = None
        self._joins = uneven_inputs == "join"
        self._joining: Joining | None = None
        self._zero_optimizer = zero_optimizer
        self._remember: Callable[[ExchangeSetting], None] | None = None
        self._undo: list[Callable[[], None]] = []
        self._graph = {"find_unused_parameters": find_unused_parameters, "static_graph": static_graph}
        if uneven_inputs not in JOIN_OR:
            raise ConfigError(f"uneven_inputs={uneven_inputs!r} is not known. Use one of {', '.join(JOIN_OR)}.")
        if self._joins:
            check_joining(self._graph)
        super().__init__(
            uneven_inputs="stop" if uneven_inputs == "join" else uneven_inputs,
            checkpoint=checkpoint,
            stopping=stopping,
            process_group_backend=process_group_backend,
            float32_matmul_precision=float32_matmul_precision,
            timeout_seconds=timeout_seconds,
            watchdog_seconds=watchdog_seconds,
        )

    @property
    def exchange_setting(self) -> ExchangeSetting:
        """How gradients are exchanged now."""
        return self._setting

    @override
    def set_up_module(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        assert self._consensus is not None
        if self._joins and self.world_size > 1:
            refuse_to_join(trainer, self.lightning_module)
            self._joining = Joining(self.lightning_module, self.global_rank)
        refuse_sharded(self.lightning_module, "ddp_tuned")
        refuse_gradients(self.lightning_module, self._comm_dtype, dist.get_backend())
        if trainer.state.fn == TrainerFn.FITTING and self.world_size > 1:
            self._choose_setting(trainer, self.lightning_module)
        super().set_up_module(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self._zero_optimizer and self.world_size > 1:
            self._share_out(self.lightning_module)

    def _share_out(self, module: nn.Module) -> None:
        """Let each rank keep the optimizers' state of its own parameters. Raises OptimizerError: it cannot be."""
        sparse = sparse_weights(module)
        for optimizer in self.optimizers:
            refuse_to_share_out(optimizer, sparse)
        owners = ZeroPartition(self.world_size)
        self._undo = [share_out(optimizer, owners, self.global_rank) for optimizer in self.optimizers]
        self.share_out_state(owners.of)

    def _choose_setting(self, trainer: Trainer, module: nn.Module) -> None:
        """Collective. Take what was chosen for this module before, or begin to try."""
        assert self._consensus is not None
        folder, every = trainer.default_root_dir, trainer.accumulate_grad_batches
        settings = (self._graph, self._sparse_grads)
        key = fingerprint(module, self.world_size, self.num_nodes, dist.get_backend(), self._comm_dtype, settings)
        if self._autotune_steps and (known := remembered(folder, key, self._consensus)) is not None:
            rank_zero_info(f"ddp_tuned: {known}, as found before for this module on {self.world_size} ranks.")
            self._setting = known
            return
        self._remember = partial(remember, folder, key) if trainer.is_global_zero else None
        trials = partial(Autotune, every=every, consensus=self._consensus, apply=self._wrap_again)
        if self._sparse_grads == "auto" and is_worth_a_trial(sparse_weights(module)):
            ways = [replace(self._start, dense_bytes=size) for size in (0, AUTO_BYTES)]
            self._autotune = trials(TRIAL_STEPS, chosen=partial(self._chose_sparse, trials), tried=ways)
        elif self._autotune_steps:
            self._autotune = trials(self._autotune_steps, chosen=self._chose, tried=candidates(self._start.dense_bytes))
        if self._autotune is not None:
            self._setting = self._autotune.tried[0]

    def _chose_sparse(self, trials: Callable[..., Autotune], setting: ExchangeSetting) -> None:
        assert self._autotune is not None
        rank_zero_info(said_of(self._autotune.slowest))
        if self._autotune_steps:
            self._autotune = trials(self._autotune_steps, chosen=self._chose, tried=candidates(setting.dense_bytes))

    def _chose(self, setting: ExchangeSetting) -> None:
        if self._remember is not None and self._autotune is not None:
            self._remember(setting)
            self._autotune.report()

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        self._wrap(self.model, is_first=True)

    def _wrap_again(self, setting: ExchangeSetting) -> None:
        """Collective, between two steps: exchange gradients in another way from now on."""
        assert isinstance(self.model, DistributedDataParallel)
        self._setting = setting
        if self._buffers is not None:
            self._buffers.stop()
        module, self.model, self._buffers = self.model.module, None, None  # the old one's hooks go with it
        self._wrap(module, is_first=False)

    @override
    def exchange_anew(self) -> None:
        self._wrap_again(self._setting)

    def _wrap(self, module: nn.Module, is_first: bool) -> None:
        assert self._consensus is not None
        ddp = self._setting.wrap(module, is_first, device_ids=self.determine_ddp_device_ids(), **self._graph)
        exchange_as(ddp, self._comm_dtype, self._setting.dense_bytes)
        self.model = ddp
        self._buffers = QuietBuffers(ddp, self._consensus.flags, rank_zero_info)

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.lightning_module is not None
        assert self._consensus is not None
        if self._joins and not self.lightning_module.trainer.predicting:
            dataloader = join_loader(dataloader, self._consensus)
            if isinstance(dataloader, JoinedLoader):
                return dataloader
        return super().process_dataloader(dataloader)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._autotune is not None and not self._autotune.is_done:
            self._autotune.before_step()
        return super().training_step(*args, **kwargs)

    @override
    def module_step(self, name: str, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        run = partial(super().module_step, name, *args, **kwargs)
        if self._joining is None:
            return run()
        assert self.model is not None
        return self._joining.step(name, self.model, args, run)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        if self._joining is not None and (weight := self._joining.weight) != 1:
            closure_loss = closure_loss * weight
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if self._joining is not None:
            self._joining.refuse_inside("self.log(on_step=True, sync_dist=True)")
        return super().reduce(tensor, *args, **kwargs)

    @override
    def all_gather(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._joining is not None:
            self._joining.refuse_inside("self.all_gather")
        return super().all_gather(tensor, *args, **kwargs)

    @override
    def end_run(self) -> None:
        self._autotune = self._joining = None
        while self._undo:
            self._undo.pop()()
        super().end_run()

    @override
    def release(self) -> None:
        self._autotune = self._joining = None
        super().release()
