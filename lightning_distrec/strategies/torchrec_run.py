"""What torchrec_sharded has during one run, and how setup sets up the layers around the sharded
tables."""

import gc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from typing_extensions import override

from lightning_distrec import gpu
from lightning_distrec._compat.gloo import receive_first
from lightning_distrec._compat.lightning import move_optimizers_to_device, wrapped_optimizers
from lightning_distrec._compat.torch import (
    broadcast_module_states,
    ignore_in_ddp,
    leave_optimizers_in_backward,
)
from lightning_distrec._compat.torchrec_ids import EXCHANGING_MODULES
from lightning_distrec._compat.torchrec_modules import (
    replace_train_pipelines,
    skip_idle_record_functions,
)
from lightning_distrec.errors import ConfigError, UnsupportedError
from lightning_distrec.kept_parameters import kept_up
from lightning_distrec.optimizers.step_hooks import refuse_inexact_optimizers
from lightning_distrec.option_values import as_options
from lightning_distrec.prefetch.even_batches import EndPolicy
from lightning_distrec.prefetch.fetcher import ReadyBatch
from lightning_distrec.prefetch.prefetcher import PrefetchOptions
from lightning_distrec.prefetch.step_calls import LookupCounts
from lightning_distrec.sharding.held_mappings import unshard_mappings
from lightning_distrec.sharding.sharded_tables import has_unused_shards, sharded_tables_of
from lightning_distrec.sharding.sharding_groups import NodeLayout, make_groups
from lightning_distrec.sharding.weights.shard_access import without_guards
from lightning_distrec.strategies.data_parallel.gradient_exchange import refuse_debug_detail
from lightning_distrec.strategies.data_parallel.losses import UnreachedLoss, reaches_a_parameter
from lightning_distrec.strategies.data_parallel.replicated_layers import (
    BroadcastSkipper,
    NoBroadcasts,
)
from lightning_distrec.strategies.fully_sharded.fsdp_options import FSDPOptions
from lightning_distrec.strategies.fully_sharded.fully_sharded_module import FullyShardedModule
from lightning_distrec.strategies.fully_sharded.shard_blocks import shard_module
from lightning_distrec.strategies.fully_sharded.shards import replace_parameters, unshard_module
from lightning_distrec.strategies.run.lightning_callbacks import adapt_callbacks
from lightning_distrec.strategies.run.precision import (
    clip_over_all_ranks,
    skip_overflows_on_all_ranks,
)
from lightning_distrec.strategies.run.process_runs import PROCESS
from lightning_distrec.strategies.run.run import Run
from lightning_distrec.strategies.tables.mapped_tables import NotedIds
from lightning_distrec.strategies.tables.prefetching import Prefetching
from lightning_distrec.strategies.tables.replicas import refuse_with_checkpoints
from lightning_distrec.strategies.tables.run_tables import RunTables
from lightning_distrec.strategies.tables.set_up import set_up_tables
from lightning_distrec.strategies.tables.set_up_inputs import SetUpInputs, TableSettings

NOTHING = nullcontext()


class NoTables:
    """In the place of a RunTables: the module has no tables, and trains as under DDP."""

    user_step = NOTHING
    lookups = own_optimizers = ()

    def begin_step(self) -> None:
        """Do nothing, nor at the other places in a step."""

    before_training_step = before_backward = after_backward = synchronize = check_steps = begin_step

    def no_sync(self) -> AbstractContextManager[None]:
        """Return an empty context."""
        return NOTHING

    def loss_factor(self) -> float:
        """Return 1: all ranks count alike."""
        return 1.0


class NoPrefetching:
    """In the place of a Prefetching: each lookup exchanges its ids when it is called."""

    def step(self, batch: Any, has_backward: bool) -> AbstractContextManager[None]:
        """Do nothing around a step."""
        return NOTHING

    def take(self, ready: ReadyBatch) -> Any:
        """Return the batch."""
        return ready.batch

    def before_backward(self) -> None:
        """Do nothing."""

    def num_waiting(self) -> int:
        """Return 0: nothing was prefetched."""
        return 0


@dataclass(kw_only=True)
class TorchRecRun(Run):
    """What torchrec_sharded has during one run."""

    tables: RunTables | NoTables = field(default_factory=NoTables)
    """The sharded tables, and what updates them."""
    prefetching: Prefetching | NoPrefetching = field(default_factory=NoPrefetching)
    """Exchanges the next batches' ids while this one computes."""

    @override
    def end(self) -> None:
        try:
            # A rank that failed takes part in no collective: the others have its error and leave as
            # well.
            if not self.has_failed:
                self.tables.check_steps()
                self.tables.synchronize()
        finally:
            super().end()
            for lookup in self.tables.lookups:
                lookup.meet_ranks = PROCESS.calls_outside.meet

    @cached_property
    def unreached_loss(self) -> UnreachedLoss:
        """What completes losses that reach no parameter."""
        lookups = self.tables.looked_up if isinstance(self.tables, RunTables) else None
        return UnreachedLoss(self.layers, self.session.consensus.rank, lookups)

    @override
    def note_unequal_batches(self, text: str) -> None:
        if not isinstance(self.tables, RunTables) or self.tables.loss_weight.warns_of_sizes:
            super().note_unequal_batches(text)

    def end_training_step(self, output: Any) -> None:
        """Raise UnsupportedError: the step has not called tables that the other ranks may wait
        in."""
        if isinstance(self.tables, RunTables) and self.session.consensus.num_ranks > 1:
            loss = output.get("loss") if isinstance(output, dict) else output
            if isinstance(loss, Tensor) and not reaches_a_parameter(loss):
                self.unreached_loss.refuse_missing_lookups(
                    self.tables.num_lookups() + self.prefetching.num_waiting()
                )

    def shard_names(self) -> list[str]:
        """Return the names of all parameters and buffers of the modules that hold tables'
        shards."""
        paths = self.tables.shards.sharded if isinstance(self.tables, RunTables) else ()
        prefixes = tuple(f"{path}." for path in paths)
        parameters = self.module.named_parameters(remove_duplicate=False)
        named = [*parameters, *self.module.named_buffers(remove_duplicate=False)]
        return [name for name, _ in named if name.startswith(prefixes)]

    @override
    def layers(self) -> dict[str, nn.Parameter]:
        # By name: the shards are parameters of torchrec's modules, which are not below the proxies
        # in the tree.
        shards = set(self.shard_names())
        layers = {}
        for name, parameter in super().layers().items():
            if name not in shards:
                layers[name] = parameter
        return layers

    @override
    def optimizers(self) -> list[Optimizer]:
        return [*super().optimizers(), *self.tables.own_optimizers]

    @override
    def unsharded(self) -> dict[str, nn.Parameter]:
        # Replicated tables are no layers.
        return (
            dict(self.tables.shards.replicated_parameters())
            if isinstance(self.tables, RunTables)
            else self.layers()
        )

    def shard_tables(
        self, strategy: DDPStrategy, settings: TableSettings, nodes: NodeLayout, shards_dense: bool
    ) -> RunTables | None:
        """Collective. Plan and shard the module's tables, and connect their optimizers; None where
        it has none."""
        # Shards of a module that is no longer used are in reference cycles, which Python would
        # collect much later.
        # Explicitly: a cycle through hooks and modules is found by the collector only. It takes
        # most of a repeated validate's set-up, whose shards stay.
        if has_unused_shards(self.module):
            gc.collect()
        if nodes.num_nodes > 1:
            # Before planning, which measures what links carry in this form.
            self.undo.enter_context(receive_first(nodes.node_of_rank, EXCHANGING_MODULES))
        checkpoints = self.session.checkpoints
        consensus = self.session.consensus
        refuse_with_checkpoints(settings.groups, checkpoints.options)
        tables = set_up_tables(
            SetUpInputs(
                trainer=self.trainer,
                module=self.module,
                settings=settings,
                consensus=consensus,
                device=strategy.root_device,
                layout=nodes,
                groups=make_groups(settings.groups, consensus, consensus.timeout),
                shards_dense=shards_dense,
            )
        )
        if tables is not None:
            self.tables = tables
            self.undo.callback(tables.undo.close)
            self.undo.enter_context(skip_idle_record_functions())
            self.undo.enter_context(replace_train_pipelines(_refuse_train_pipeline))
            noted = NotedIds(tables.shards.mappings)
            if noted:
                checkpoints.positions.keep_rank_state("noted_ids", noted)
        elif shards_dense:
            raise ConfigError(
                "dense='fsdp': no embedding table of the module is sharded. Use "
                "strategy='fsdp_tuned'."
            )
        else:
            rank_zero_info(
                "torchrec_sharded: no embedding table is sharded; the module trains as under plain "
                "DDP."
            )
        return tables

    def set_up_dense(
        self,
        strategy: DDPStrategy,
        tables: RunTables,
        fsdp: FSDPOptions | None,
        mesh: DeviceMesh | None,
    ) -> None:
        """Collective. Do what DDPStrategy.setup does, for the layers without tables.

        fsdp, mesh: how they are sharded, over which ranks; None: DDP averages their gradients, and
        ignores the shards.
        """
        module = self.module
        plugin = strategy.precision_plugin
        consensus = self.session.consensus
        # convert_module and model_to_device would cast and move tables, whose kernels own their
        # memory.
        with tables.shards.removed():  # tables keep their type and their device
            plugin.convert_module(module)
            if fsdp is None or mesh is None:
                strategy.model_to_device()
            else:
                # fully_shard puts new parameters in the place of the old ones, which the optimizers
                # still hold.
                old_parameters = dict(module.named_parameters(remove_duplicate=False))
                shard_module(
                    module, fsdp, mesh, strategy.root_device, str(self.trainer.precision), consensus
                )
                self.dense = sharded = FullyShardedModule(module, fsdp, consensus)
                self.undo.callback(sharded.teardown)
                replace_parameters(
                    tables.optimizers,
                    old_parameters,
                    dict(module.named_parameters(remove_duplicate=False)),
                )
                strategy.model = module
                refuse_inexact_optimizers(tables.optimizers)
        ignore_in_ddp(module, self.shard_names())
        if self.is_fitting:
            # DDPStrategy.setup would run configure_optimizers again, on shards.
            strategy.optimizers = tables.optimizers
            strategy.lr_scheduler_configs = tables.lr_scheduler_configs
            if fsdp is None:
                strategy.configure_ddp()
            shards = tables.shards.sharded_parameters
            table_optimizers = tables.table_optimizers
            # Of tables that step in backward no gradient is left to clip, in one process either.
            fused: dict[int, str] = {}
            for name in tables.shards.fused_tables:
                fused |= {id(shard.weight): name for shard in tables.shards.shards[name]}
            replicas = tables.shards.groups.num_replicas
            self.undo.enter_context(
                clip_over_all_ranks(plugin, shards, fused, table_optimizers, replicas)
            )
            # An overflow on one rank skips the step on all, or replicas of dense layers drift
            # apart.
            self.undo.callback(
                skip_overflows_on_all_ranks(plugin, strategy.optimizers, table_optimizers)
            )
            adapt_callbacks(self.trainer, module, strategy.lightning_module_state_dict)
        elif fsdp is None:
            broadcast_module_states(module, self.shard_names())
        strategy.setup_precision_plugin()
        wrappers = wrapped_optimizers(strategy)
        optimizers = [*strategy.optimizers, *wrappers]  # the plugin may have replaced them
        if self.is_fitting:
            tables.connect_zero_grad(strategy.optimizers, wrappers)
        if not isinstance(self.dense, FullyShardedModule):
            move_optimizers_to_device(
                [*strategy.optimizers, *tables.own_optimizers], strategy.root_device
            )
        elif self.is_fitting:
            self.buffers = self.dense.begin_training(optimizers, consensus)

    def wrap_dense(self, strategy: DDPStrategy, wrap: Callable[[], None]) -> None:
        """Collective. Let `wrap`, DDPStrategy's own, wrap the module in DDP, which ignores the
        tables' shards."""
        self.buffers.stop()
        # the last references: an old wrapper's hooks go too
        self.buffers = NoBroadcasts()
        strategy.model = self.module
        shard_names = self.shard_names()
        dense = list(self.layers().values())
        self.frozen = [parameter for parameter in dense if not parameter.requires_grad]
        if shard_names and len(self.frozen) == len(dense):
            # DDP refuses a module without gradients to average
            broadcast_module_states(self.module, shard_names)
            return
        refuse_debug_detail()
        # Lightning builds DDP on a stream of its own, which waits for no other.
        with gpu.idle(strategy.root_device):
            wrap()
        ddp: Any = strategy.model
        leave_optimizers_in_backward(ddp)
        self.buffers = BroadcastSkipper(ddp, self.session.consensus.flags)

    def start_prefetching(
        self, strategy: DDPStrategy, tables: RunTables, options: PrefetchOptions, end: EndPolicy
    ) -> dict[str, LookupCounts]:
        """Let lookups of the next batches exchange their ids ahead. Return the counts of lookups,
        by kind of step."""
        self.prefetching = prefetching = Prefetching(
            strategy, self.module, tables, options, self.session.step_consensus, end
        )
        self.undo.callback(lambda: prefetching.release(self.has_failed))
        return prefetching.prefetcher.counts


def _refuse_train_pipeline(pipeline: Any, *_: Any, **__: Any) -> NoReturn:
    raise UnsupportedError(
        f"{type(pipeline).__name__}.progress was called in a step. Remove the pipeline and return "
        "the batch's loss: the strategy prefetches the next batches' ids (prefetch={'depth': 3}), "
        "and Lightning calls backward and step."
    )


def dense_options(dense: str, fsdp: FSDPOptions | dict[str, Any] | None) -> FSDPOptions | None:
    """Return how layers without tables are sharded; None where DDP trains them. Raises
    ConfigError."""
    if dense not in ("ddp", "fsdp"):
        raise ConfigError(f"dense={dense!r} is not known. Use 'ddp' or 'fsdp'.")
    if dense == "ddp" and fsdp is not None:
        raise ConfigError(
            f"fsdp={fsdp!r} is for dense='fsdp', and dense is 'ddp'. Set one of them."
        )
    options = as_options("fsdp", FSDPOptions, fsdp) if dense == "fsdp" else None
    if options and options.offload:
        raise ConfigError(
            "fsdp={'offload': True}: layers beside tables stay on the GPU; only fsdp_tuned "
            "offloads."
        )
    return options


@without_guards
def unshard(module: nn.Module, full: Mapping[str, Tensor]) -> None:
    """Replace all shards of a module by full weights. full: by key; those that are missing stay on
    meta."""
    tables = sharded_tables_of(module)
    if tables is not None:
        with kept_up(module):
            tables.unshard(full)
        unshard_mappings(tables, full)
    unshard_module(module, full)
