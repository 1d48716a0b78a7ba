"""`Trainer(strategy="torchrec_sharded")`: tables sharded over the ranks by TorchRec, everything
else as under DDP."""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import Unpack, override

from lightning_distrec import spans
from lightning_distrec.option_values import as_options, plain
from lightning_distrec.prefetch.even_batches import EndPolicy
from lightning_distrec.prefetch.fetcher import ReadyBatch
from lightning_distrec.prefetch.prefetcher import PrefetchOptions
from lightning_distrec.prefetch.step_calls import LookupCounts
from lightning_distrec.sharding.lookup.lookup_setup import CheckIds
from lightning_distrec.sharding.meta_tables import tables_on_meta
from lightning_distrec.sharding.plain_embeddings import Conversion, Convert
from lightning_distrec.sharding.planning.table_options import (
    EmbeddingUpdate,
    PlanningOptions,
    TableOptions,
)
from lightning_distrec.sharding.sharders import QuantizedComms, as_comms
from lightning_distrec.sharding.sharding_groups import ShardingGroupOptions
from lightning_distrec.sharding.weights.shard_access import plain_shards
from lightning_distrec.strategies.data_parallel.losses import LossReduction
from lightning_distrec.strategies.fully_sharded.fsdp_options import FSDPOptions, make_mesh
from lightning_distrec.strategies.fully_sharded.shards import (
    drop_unfinished_step,
    refuse_absent,
    refuse_sharded,
)
from lightning_distrec.strategies.run.strategy_arguments import (
    RunOptions,
    any_at_run_time,
    check_arguments,
)
from lightning_distrec.strategies.tables.full_tables import FullTables
from lightning_distrec.strategies.tables.set_up_inputs import TableSettings
from lightning_distrec.strategies.torchrec_run import TorchRecRun, dense_options, unshard


class TorchRecShardedStrategy(FullTables[TorchRecRun]):
    """Shards the embedding tables of an unchanged LightningModule; the rest of it trains as under
    DDP.

    Every EmbeddingBagCollection and EmbeddingCollection of the module, and every large nn.Embedding
    and nn.EmbeddingBag, is planned and sharded in set-up. The optimizers of `configure_optimizers`
    keep updating their tables with the same numbers; the start table shows how. What cannot be
    exact raises before the first step.

    Args:
        embedding_update: how tables are updated. "auto": inside of backward where FBGEMM has the
            same numbers and nothing must come between, otherwise by the user's optimizer on each
            rank's shards. "fused", "sparse", "dense": that, or an error. "fused_lazy": Adam on
            touched rows only (CUDA), which gives other numbers.
        table_optimizer: class_path, init_args and lr_scheduler of an optimizer that updates the
            tables, together with the module's one. None: the module's.
        convert_embeddings: which nn.Embedding and nn.EmbeddingBag are sharded too. "auto": those
            with at least `min_rows` rows that can be; "all"; "none"; or a list of their paths.
        min_rows: see convert_embeddings.
        sharding_types: sharding types that the planner may choose, for example ["table_wise",
            "row_wise"]; None: all.
        tables: options for single tables, by name or by a pattern such as "user_*": see
            TableOptions.
        check_ids: what to do about an id outside of its table: "error" on every rank, "warn", or
            "ignore": row 0.
        prefetch: depth, the number of batches in flight. 1: lookups exchange ids when they are
            called; from 2 on the next batch's ids are exchanged while this one computes.
            computed_ids: whether also those that the step computes. None: 3, and true.
        quantized_comms: forward and backward, the types in which rows and their gradients are sent:
            "fp32", "fp16" or "bf16". 16 bits halve the bytes and give other numbers. None: float32.
        loss_reduction: what `training_step` returns, for ranks whose batches have unequal sizes.
            "mean" over the batch: ranks are weighted by their number of examples, where lookups
            show it (those of nn.Embedding do not); "sum" over the batch; "rank_mean": all ranks
            count alike, as in DDP.
        memory_bytes_per_rank: memory of a rank, of which tables get what planning.reserve leaves.
            None: measure it.
        batch_size_per_rank: examples per rank and step, for estimates. None: `batch_size` of the
            loader that fit gets, of the datamodule, the module or their hparams, or else 512.
        planning: how plans are made, and what is assumed of the machines: see PlanningOptions.
        sharding_groups: tables are sharded within groups of ranks, each with a replica: see
            ShardingGroupOptions.
        find_unused_parameters: as in DDP, for dense layers that some steps do not use.
        static_graph: as in DDP, for dense layers that every step uses alike.
        dense: how the layers without tables train. "ddp": every rank has them; "fsdp": sharded as
            under "fsdp_tuned".
        fsdp: for dense="fsdp": see FSDPOptions.
        bucket_cap_mb: size of DDP's gradient buckets in MiB.
        run_options: what all strategies take, as checkpoint and stopping: see DistRecStrategy.
    """

    strategy_name = "torchrec_sharded"

    @any_at_run_time
    def __init__(
        self,
        embedding_update: EmbeddingUpdate = "auto",
        convert_embeddings: Convert | list[str] = "auto",
        min_rows: int = 100_000,
        sharding_types: list[str] | None = None,
        tables: dict[str, TableOptions] | None = None,
        check_ids: CheckIds = "error",
        prefetch: PrefetchOptions | dict[str, Any] | None = None,
        quantized_comms: QuantizedComms | dict[str, str] | None = None,
        loss_reduction: LossReduction = "mean",
        memory_bytes_per_rank: int | None = None,
        batch_size_per_rank: int | None = None,
        planning: PlanningOptions | dict[str, Any] | None = None,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        dense: Literal["ddp", "fsdp"] = "ddp",
        fsdp: FSDPOptions | dict[str, Any] | None = None,
        bucket_cap_mb: float = 25.0,
        table_optimizer: dict[str, Any] | None = None,
        sharding_groups: ShardingGroupOptions | dict[str, Any] | None = None,
        **run_options: Unpack[RunOptions],
    ) -> None:
        check_arguments(TorchRecShardedStrategy, locals())
        self.table_settings = TableSettings(
            default_options=TableOptions(
                embedding_update=embedding_update,
                optimizer=table_optimizer,
                sharding_types=sharding_types,
            ),
            conversion=Conversion(convert_embeddings, min_rows),
            table_options=tables or {},
            check_ids=check_ids,
            comms=as_options("quantized_comms", QuantizedComms, as_comms(quantized_comms)),
            loss_reduction=loss_reduction,
            memory_bytes_per_rank=memory_bytes_per_rank,
            batch_size_per_rank=batch_size_per_rank,
            planning=as_options("planning", PlanningOptions, planning),
            groups=as_options("sharding_groups", ShardingGroupOptions, sharding_groups),
        )
        self._fsdp_options = dense_options(dense, fsdp)
        self._dense_mesh: DeviceMesh | None = None
        self._prefetch_options = as_options("prefetch", PrefetchOptions, prefetch)
        self.lookups_ahead: dict[str, LookupCounts] = {}
        """Kind of step -> its lookups in this run, or the last, and how many had their ids sent
        ahead of the step."""
        super().__init__(**run_options)
        # DDPStrategy hands these to DistributedDataParallel when it wraps the module, in
        # configure_ddp.
        # Not by super().__init__: jsonargparse would follow **kwargs from there into
        # DistributedDataParallel.
        self._ddp_kwargs = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "bucket_cap_mb": plain(bucket_cap_mb),
            "gradient_as_bucket_view": True,
        }

    @property
    def table_optimizers(self) -> list[Optimizer]:
        """The optimizers that table_optimizer has made, in a fit; those of the module are
        `optimizers`."""
        return [] if self.run_tables is None else self.run_tables.table_optimizers

    @property
    def shards_dense(self) -> bool:
        """Whether the layers without tables are sharded over the ranks."""
        return self._fsdp_options is not None

    # -- Lightning's hooks in the order in which it calls them; those of all strategies are in
    # run/strategy.py

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        with (
            super().tensor_init_context(empty_init),
            tables_on_meta(self.table_settings.conversion),
        ):
            yield

    @override
    def setup(self, trainer: Trainer) -> None:
        run = self.begin_run(trainer, TorchRecRun)
        refuse_absent(run.module, self.strategy_name)
        if self._fsdp_options is None:
            refuse_sharded(run.module, "torchrec_sharded with dense='ddp'")
        else:
            drop_unfinished_step(run.module)
        nodes = run.session.nodes
        tables = run.shard_tables(self, self.table_settings, nodes, self.shards_dense)
        if tables is None:
            # Without tables all is as under DDP, with our checkpoints.
            super().setup(trainer)
            self.begin_checkpoints(run, tables)
            return
        trainer.accelerator.setup(trainer)
        # Before anything is wrapped or sharded: SyncBatchNorm replaces modules of the tree.
        if run.is_fitting and self._layer_sync:
            self.model = self._layer_sync.apply(run.module)
        # One mesh for all runs: a DTensor remembers its mesh, and one of another mesh cannot be
        # mixed with it.
        if self._fsdp_options is not None and self._dense_mesh is None:
            self._dense_mesh = make_mesh(
                self._fsdp_options, self.root_device, nodes.local_sizes, self._wait
            )
        run.set_up_dense(self, tables, self._fsdp_options, self._dense_mesh)
        self.begin_checkpoints(run, tables)
        if self._prefetch_options.depth > 1:
            # At depth 1 no batch is fetched ahead, and Lightning's own fetchers and ends of epochs
            # stay.
            end = EndPolicy(run.session.consensus, self._uneven_inputs, rank_zero_warn)
            self.lookups_ahead = run.start_prefetching(self, tables, self._prefetch_options, end)

    @override
    def configure_ddp(self) -> None:
        """Collective, in setup, and in a run when layers unfreeze. Wrap the module in DDP, which
        ignores the shards."""
        self.run.wrap_dense(self, super().configure_ddp)

    @override
    def batch_to_device(
        self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0
    ) -> Any:
        if isinstance(batch, ReadyBatch):
            return self.run.prefetching.take(batch)
        return super().batch_to_device(batch, device, dataloader_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        # The user's code must see guarded shards again, also where an update before has raised.
        plain_shards.close()
        run = self.before_training_step(args[0])
        run.tables.before_training_step()
        # By hand, backward runs inside of training_step, and the ids that wait for it must be sent
        # earlier.
        has_backward = run.module.automatic_optimization
        with (
            spans.span(spans.FORWARD),
            run.dense.step(),
            run.prefetching.step(args[0], has_backward),
            run.tables.user_step,
        ):
            output = self.call_training_step(*args, **kwargs)
            run.end_training_step(output)
            return output

    @contextmanager
    @override
    def evaluation_step(self, *args: Any) -> Iterator[None]:
        run = self.run
        # Collective where replicas of tables differ: an evaluation has one value for each row.
        run.tables.synchronize()
        run.tables.begin_step()
        with (
            run.evaluation_step(),
            run.prefetching.step(args[0], has_backward=False),
            run.tables.user_step,
        ):
            yield

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        with super().block_backward_sync(), self.run.tables.no_sync():
            yield

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        run = self.run
        factor = run.tables.loss_factor()
        # The multiplication is skipped where all ranks count alike: a factor of 1 would still add a
        # node to autograd.
        loss = closure_loss if factor == 1.0 else closure_loss * factor
        loss = super().backward(loss, optimizer, *args, **kwargs)
        run.tables.after_backward()
        return loss

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        run = self.run
        run.tables.before_backward()
        run.prefetching.before_backward()
        super().pre_backward(closure_loss)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # As in fsdp.py.
        drop_unfinished_step(self.module)
        super().load_model_state_dict(checkpoint, strict)

    @override
    def put_weights_back(self, full: dict[str, Tensor]) -> None:
        unshard(self.module, full)
