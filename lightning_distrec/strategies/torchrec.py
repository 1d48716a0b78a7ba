"""`Trainer(strategy="torchrec_sharded")`: tables sharded over the ranks by TorchRec, everything else as under DDP."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_distrec._compat.lightning import move_optimizers_to_device, wrapped_optimizers
from lightning_distrec._compat.torch import broadcast_module_states, ignore_in_ddp
from lightning_distrec.checkpoint.options import CheckpointOptions
from lightning_distrec.errors import ConfigError
from lightning_distrec.optimizers.loss_weight import LossReduction, check_loss_reduction
from lightning_distrec.pipeline.even_batches import EndPolicy, UnevenInputs
from lightning_distrec.pipeline.fetcher import ReadyBatch
from lightning_distrec.pipeline.options import PipelineOptions
from lightning_distrec.pipeline.sparse_pipeline import LookupCounts
from lightning_distrec.sharding.lookup.ids_check import CheckIds, check_check_ids
from lightning_distrec.sharding.meta_tables import tables_on_meta
from lightning_distrec.sharding.plain_embeddings import Conversion, Convert
from lightning_distrec.sharding.planning.planning_options import PlanningOptions
from lightning_distrec.sharding.planning.table_options import EmbeddingUpdate, TableOptions
from lightning_distrec.sharding.planning.topology import NodeLayout
from lightning_distrec.sharding.quantized_comms import QuantizedComms
from lightning_distrec.sharding.sharded_tables import sharded_tables_of
from lightning_distrec.strategies.fully_sharded.dense_layers import replace_parameters
from lightning_distrec.strategies.fully_sharded.fsdp_options import FSDPOptions
from lightning_distrec.strategies.fully_sharded.fully_sharded_module import drop_unfinished_step, shard_module
from lightning_distrec.strategies.fully_sharded.hooks import ShardedHooks
from lightning_distrec.strategies.fully_sharded.mesh import make_mesh
from lightning_distrec.strategies.fully_sharded.refusals import refuse_inexact_optimizers, refuse_sharded
from lightning_distrec.strategies.run.buffer_broadcasts import QuietBuffers
from lightning_distrec.strategies.run.given_options import as_options
from lightning_distrec.strategies.run.lightning_callbacks import adapt_callbacks
from lightning_distrec.strategies.run.precision import (
    GlobalClipping,
    MatmulPrecision,
    agree_on_overflows,
    output_dtype,
)
from lightning_distrec.strategies.run.stopping import StopOptions
from lightning_distrec.strategies.run.strategy import warn
from lightning_distrec.strategies.tables.decisions import TableSettings
from lightning_distrec.strategies.tables.pipelining import Pipelining
from lightning_distrec.strategies.tables.plan_files import save_beside_logs
from lightning_distrec.strategies.tables.set_up import set_up_tables
from lightning_distrec.strategies.tables.table_run import TableRun
from lightning_distrec.strategies.tables.table_setup import TableSetup


class TorchRecShardedStrategy(ShardedHooks):
    """Shards the embedding tables of an unchanged LightningModule; the rest of it trains as under DDP.

    Every EmbeddingBagCollection and EmbeddingCollection of the module, and every large nn.Embedding and
    nn.EmbeddingBag, is planned and sharded when fit, validate, test or predict sets up. The optimizers of
    `configure_optimizers` keep updating their tables with the same numbers; the table that is printed at the start says
    how. What cannot be exact raises before the first step.

    Args:
        embedding_update: how updates reach the tables. "auto": inside of backward where FBGEMM has the same numbers
            and nothing must come between (clipping, accumulation, loss scaling), else the user's optimizer on each
            rank's shard. "fused", "sparse", "dense": that, or an error. "fused_lazy": Adam on touched rows only (CUDA),
            which is not the same numbers.
        convert_embeddings: which nn.Embedding and nn.EmbeddingBag are sharded too. "auto": those of at least
            `min_rows` rows that can be; "all", "none", or a list of their paths.
        min_rows: see convert_embeddings.
        sharding_types: ways in which tables may be cut, for example ["table_wise", "row_wise"]; None allows all.
        tables: options for single tables by name, or by a pattern such as "user_*": embedding_update, sharding_types,
            compute_kernels, min_partition, pooling_factor, batch_size, cache_load_factor, device_group, dtype,
            keep_whole: see TableOptions.
        check_ids: what an id outside of its table does: "error" on every rank, "warn" or "ignore" and look up row 0.
        uneven_inputs: when ranks have unequal numbers of batches, "stop" after the last that all have, or "error".
        pipeline: depth, how many batches are in flight: 1 looks tables up as they are called; from 2 on the next
            batch's ids travel while this one computes; 3 if None.
        quantized_comms: forward and backward, the types in which rows and their gradients travel: "fp32", "fp16" or
            "bf16". Fewer bytes, and not the same numbers; None: float32.
        checkpoint: distributed, async_save, start_from, rename, grow_tables: see CheckpointOptions; by default every
            rank writes its own part of a folder, which any number of ranks and any plan can load.
        stopping: auto_requeue, requeue_signal, on_sigterm, resume: see StopOptions; by default the signal that Slurm
            sends before the time is over saves a checkpoint and requeues the job, which goes on from it.
        loss_reduction: what `training_step` returns, for ranks whose batches have unequal sizes. "mean" over the batch:
            ranks are weighted by their number of examples, where lookups tell it (not those of nn.Embedding); "sum"
            over it; "rank_mean": all ranks count alike, as in DDP.
        memory_bytes_per_rank: memory of one rank in bytes, of which tables get what planning.reserve leaves; None
            measures it.
        batch_size_per_rank: examples per rank and step, for the planner's estimates.
        planning: bandwidths, reserve, plan_file, save_plan: where tables go, and what is believed of the machine; see
            PlanningOptions.
        find_unused_parameters: as DDP's, for dense layers that some steps do not use.
        static_graph: as DDP's, for dense layers that every step uses alike.
        dense: what the layers without tables train as: "ddp", every rank has them; "fsdp": they are cut over the ranks
            as under "fsdp_tuned".
        fsdp: wrap, min_num_parameters, replicas, reshard_after_forward, activation_checkpointing, cpu_offload: see
            FSDPOptions; for dense="fsdp".
        bucket_cap_mb: size of DDP's gradient buckets in MiB.
        process_group_backend: "gloo" or "nccl"; None takes the device's.
        float32_matmul_precision: "high" computes float32 products of dense layers in TF32, "medium" in bfloat16, where
            the device can; "highest" in float32. None leaves torch's setting as it is.
        timeout_seconds: how long a rank waits for the others in any exchange.
        watchdog_seconds: after so long a rank that has been stopped, or is not heard of, ends the others, which name
            it; one whose process has ended does at once. 0: nobody watches.
    """

    strategy_name = "torchrec_sharded"

    def __init__(
        self,
        embedding_update: EmbeddingUpdate = "auto",
        convert_embeddings: Convert | list[str] = "auto",
        min_rows: int = 100_000,
        sharding_types: list[str] | None = None,
        tables: dict[str, TableOptions] | None = None,
        check_ids: CheckIds = "error",
        uneven_inputs: UnevenInputs = "stop",
        pipeline: PipelineOptions | dict[str, int] | None = None,
        quantized_comms: QuantizedComms | dict[str, str] | None = None,
        checkpoint: CheckpointOptions | dict[str, Any] | None = None,
        stopping: StopOptions | dict[str, Any] | None = None,
        loss_reduction: LossReduction = "mean",
        memory_bytes_per_rank: int | None = None,
        batch_size_per_rank: int = 512,
        planning: PlanningOptions | dict[str, Any] | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        dense: Literal["ddp", "fsdp"] = "ddp",
        fsdp: FSDPOptions | dict[str, Any] | None = None,
        bucket_cap_mb: int = 25,
        process_group_backend: str | None = None,
        float32_matmul_precision: MatmulPrecision | None = None,
        timeout_seconds: float = 1800.0,
        watchdog_seconds: float = 30.0,
    ) -> None:
        check_check_ids(check_ids)
        check_loss_reduction(loss_reduction)
        if batch_size_per_rank <= 0:
            raise ConfigError(f"batch_size_per_rank={batch_size_per_rank}: must be above 0.")
        self._settings = TableSettings(
            everywhere=TableOptions(embedding_update=embedding_update, sharding_types=sharding_types),
            conversion=Conversion(convert_embeddings, min_rows),
            by_table=tables or {},
            check_ids=check_ids,
            comms=as_options("quantized_comms", QuantizedComms, quantized_comms),
            loss_reduction=loss_reduction,
            memory_bytes_per_rank=memory_bytes_per_rank,
            batch_size_per_rank=batch_size_per_rank,
            planning=as_options("planning", PlanningOptions, planning),
        )
        if dense not in ("ddp", "fsdp"):
            raise ConfigError(f"dense={dense!r} is not known. Use 'ddp' or 'fsdp'.")
        if dense == "ddp" and fsdp is not None:
            raise ConfigError(f"fsdp={fsdp!r} is for dense='fsdp', and dense is 'ddp'. Set one of them.")
        self._fsdp_options = as_options("fsdp", FSDPOptions, fsdp) if dense == "fsdp" else None
        self._mesh: DeviceMesh | None = None
        self._pipeline_options = as_options("pipeline", PipelineOptions, pipeline)
        self._pipelining: Pipelining | None = None
        self._lookups_ahead: dict[str, LookupCounts] = {}
        self._places = NodeLayout.of_nodes(1)
        self._tables: TableSetup | None = None
        self._clipping = GlobalClipping()
        super().__init__(
            uneven_inputs=uneven_inputs,
            checkpoint=checkpoint,
            stopping=stopping,
            process_group_backend=process_group_backend,
            float32_matmul_precision=float32_matmul_precision,
            timeout_seconds=timeout_seconds,
            watchdog_seconds=watchdog_seconds,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=True,
        )

    @property
    def table_setup(self) -> TableSetup | None:
        """The sharded tables of the run in progress, for callbacks to look at; None without tables."""
        return self._tables

    @property
    def table_settings(self) -> TableSettings:
        """What the strategy was told about tables."""
        return self._settings

    @property
    def cuts_dense(self) -> bool:
        """Whether the layers without tables are cut over the ranks."""
        return self._fsdp_options is not None

    @property
    def lookups_ahead(self) -> dict[str, LookupCounts]:
        """Kind of step -> its lookups in this run, or the last, and how many had their ids sent ahead of the step."""
        return self._lookups_ahead

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        assert self._consensus is not None
        told = self._consensus.all_gather((self.node_rank, self.num_local_ranks))
        self._places = NodeLayout.gathered(told)
        on_nodes = [here for _, here in told]
        if self._fsdp_options is not None and self._mesh is None:
            self._mesh = make_mesh(self._fsdp_options, self.root_device, on_nodes, self._waits)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        with super().tensor_init_context(empty_init), tables_on_meta():
            yield

    @override
    def set_up_module(self, trainer: Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        assert self._consensus is not None
        assert self._of_steps is not None
        if self._fsdp_options is None:
            refuse_sharded(module, "torchrec_sharded with dense='ddp'")
        else:
            drop_unfinished_step(module)
        run = TableRun(
            trainer=trainer,
            module=module,
            settings=self._settings,
            consensus=self._consensus,
            device=self.root_device,
            places=self._places,
            output_dtype=output_dtype(str(trainer.precision)),
            cuts_dense=self.cuts_dense,
        )
        self._tables = set_up_tables(run)
        if self._tables is None and self.cuts_dense:
            raise ConfigError(
                "dense='fsdp': the module has no embedding tables that torchrec_sharded would shard. Use "
                "strategy='fsdp_tuned', which takes the same options, or dense='ddp'."
            )
        if self._tables is None:
            rank_zero_info("torchrec_sharded: the module has no embedding tables; it trains as under plain DDP.")
            super().set_up_module(trainer)
            return
        self._setup_around_tables(trainer, self._tables)
        self.begin_checkpoints(module, self._tables)
        if self._tables.written_plan is not None:
            save_beside_logs(trainer, self._tables.written_plan)
        if self._pipeline_options.depth > 1:
            self._pipelining = Pipelining(
                trainer,
                module,
                self._tables,
                self._pipeline_options.depth,
                self._of_steps,
                EndPolicy(self._consensus, self._uneven_inputs, warn),
                lambda batch, dataloader_idx: super(DDPStrategy, self).batch_to_device(
                    batch, dataloader_idx=dataloader_idx
                ),
                self.root_device,
            )
            self._lookups_ahead = self._pipelining.pipeline.counts

    def _setup_around_tables(self, trainer: Trainer, tables: TableSetup) -> None:
        """The rest of DDPStrategy.setup, with the shards left out of DDP's broadcast and averaging."""
        module = self.lightning_module
        assert module is not None
        assert self.accelerator is not None
        fitting = trainer.state.fn == TrainerFn.FITTING
        self.accelerator.setup(trainer)
        if fitting and self._layer_sync:
            self.model = self._layer_sync.apply(module)
        with tables.shards.removed():  # tables keep their type and their place
            self.precision_plugin.convert_module(module)
            if self._fsdp_options is None or self._mesh is None:
                self.model_to_device()
            else:
                self._shard_dense(module, tables, self._fsdp_options, self._mesh, str(trainer.precision))
        ignore_in_ddp(module, _names_below(module, tables.shards.sharded))
        if fitting:
            self.optimizers, self.lr_scheduler_configs = tables.optimizers, tables.lr_scheduler_configs
            if self._sharded is None:
                self._wrap_dense(module, tables)
            self._clipping.put_on(self.precision_plugin, tables.shards.sharded_parameters, tables.fused_tables)
            tables.undo.append(agree_on_overflows(self.precision_plugin, self.optimizers))
            adapt_callbacks(trainer, module, tables.shards, self.lightning_module_state_dict)
        elif self._sharded is None:
            broadcast_module_states(module, _names_below(module, tables.shards.sharded))
        self.setup_precision_plugin()
        if self._sharded is None:
            move_optimizers_to_device(self.optimizers, self.root_device)
        elif fitting:
            assert self._consensus is not None
            optimizers = [*self.optimizers, *wrapped_optimizers(self)]  # the plugin has the last word about them
            self._buffers = self._sharded.begin_training(optimizers, self._consensus)

    def _shard_dense(
        self, module: LightningModule, tables: TableSetup, options: FSDPOptions, mesh: DeviceMesh, precision: str
    ) -> None:
        """Collective, while the tables are out of the module. Shard its other layers."""
        assert self._consensus is not None
        before = dict(module.named_parameters(remove_duplicate=False))
        self._sharded = shard_module(module, options, mesh, self.root_device, precision, self._consensus)
        replace_parameters(tables.optimizers, before, dict(module.named_parameters(remove_duplicate=False)))
        self.model = module
        refuse_inexact_optimizers(tables.optimizers)

    @override
    def exchanged_parameters(self) -> list[nn.Parameter]:
        if self._sharded is not None:
            return []
        assert self.lightning_module is not None
        shards = (
            set() if self._tables is None else set(_names_below(self.lightning_module, self._tables.shards.sharded))
        )
        return [p for name, p in self.lightning_module.named_parameters() if name not in shards]

    @override
    def exchange_anew(self) -> None:
        if self._tables is None:
            super().exchange_anew()
            return
        assert self.lightning_module is not None
        if self._buffers is not None:
            self._buffers.stop()
        self.model = self.lightning_module
        self._wrap_dense(self.lightning_module, self._tables)

    def _wrap_dense(self, module: nn.Module, tables: TableSetup) -> None:
        """DDP for what is not a shard; it refuses a module in which nothing is left to average."""
        shards = set(_names_below(module, tables.shards.sharded))
        if any(p.requires_grad for name, p in module.named_parameters() if name not in shards):
            self.configure_ddp()
            assert isinstance(self.model, DistributedDataParallel)
            assert self._consensus is not None
            self._buffers = QuietBuffers(self.model, self._consensus.flags, rank_zero_info)
        else:
            broadcast_module_states(module, list(shards))

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, ReadyBatch):
            assert self._pipelining is not None
            return self._pipelining.take(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        if self._tables is not None:
            self._tables.before_training_step()
        return super().training_step(*args, **kwargs)

    @contextmanager
    @override
    def around_step(self, args: tuple[Any, ...], has_backward: bool) -> Iterator[None]:
        with (
            super().around_step(args, has_backward),
            nullcontext() if self._pipelining is None or not args else self._pipelining.step(args[0], has_backward),
        ):
            yield

    @override
    def before_evaluation_step(self) -> None:
        if self._tables is not None:
            self._tables.begin_step()

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        if self._tables is not None:
            self._tables.backward_watch.backward()
        if self._pipelining is not None:
            self._pipelining.before_backward()
        super().pre_backward(closure_loss)

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        factor = 1.0 if self._tables is None else self._tables.loss_weight.factor()
        loss = closure_loss if factor == 1.0 else closure_loss * factor
        return super().backward(loss, optimizer, *args, **kwargs)

    @override
    def end_run(self) -> None:
        self.end_sharded()
        if self._pipelining is not None:
            self._pipelining.release(self._failed)
            self._pipelining = None
        self.stop_listening()
        self._clipping.take_off()
        if self._tables is not None:
            self._tables.release()
        self._tables = None
        if not self._has_tables():
            super().end_run()
            return
        # Not DDPStrategy's: it would move the module to the CPU. Shards stay where their kernels are, and tables that
        # were built without memory have nothing to move.
        self.model = self.lightning_module
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _has_tables(self) -> bool:
        module = self.lightning_module
        if module is None:
            return False
        return sharded_tables_of(module) is not None or any(p.is_meta for p in module.parameters())

    @override
    def release(self) -> None:
        self._tables = None
        super().release()


def _names_below(module: nn.Module, paths: Iterable[str]) -> list[str]:
    """Return the names of all parameters and buffers of the submodules at `paths`."""
    prefixes = tuple(f"{path}." for path in paths)
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return [name for name, _ in named if name.startswith(prefixes)]
