"""Connects prefetching with the tables and with Lightning's loops, for the time of one run.

A batch's way: PrefetchFetcher draws it and calls `Prefetching._make_ready`; the strategy unpacks it
with `take` and runs the user's step inside of `step`; the step calls a ShardedProxy, which asks
`Prefetcher.take` for what was looked up ahead, and else its ShardedLookup; the lookup reports
arrived rows to `Prefetcher.rows_arrived`.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_distrec._compat.lightning import (
    call_transfer_hook,
    replace_fetchers,
    skip_transfer_hook_when,
)
from lightning_distrec._compat.patches import Patches
from lightning_distrec._compat.torch import versions_of
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import ConfigError, ShardingError
from lightning_distrec.prefetch.batch_objects import BatchObjects
from lightning_distrec.prefetch.even_batches import EndPolicy
from lightning_distrec.prefetch.fetcher import (
    PrefetchFetcher,
    ReadyBatch,
    Streams,
    move_jagged,
    pin,
)
from lightning_distrec.prefetch.in_flight_batch import InFlightBatch
from lightning_distrec.prefetch.prefetcher import IdsExchange, Prefetcher, PrefetchOptions
from lightning_distrec.prefetch.recorder import Recorder
from lightning_distrec.prefetch.sources import BatchRoots, has_same_leaves
from lightning_distrec.prefetch.step_calls import Learner
from lightning_distrec.recorded_step import LIBRARY_OPERATIONS, LateWeights
from lightning_distrec.sharding.lookup.ids_exchange import start_exchange
from lightning_distrec.sharding.lookup.lookup_formats import BegunFeatures
from lightning_distrec.sharding.lookup.request import LookupRequest
from lightning_distrec.sharding.lookup.sharded_lookup import LookedUp, ShardedLookup
from lightning_distrec.sharding.proxies import ShardedProxy
from lightning_distrec.sharding.weights.shard_access import without_guard
from lightning_distrec.strategies.tables.run_tables import RunTables

KINDS = {
    RunningStage.TRAINING: "training",
    RunningStage.SANITY_CHECKING: "validation",
    RunningStage.VALIDATING: "validation",
    RunningStage.TESTING: "test",
    RunningStage.PREDICTING: "prediction",
}


TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks of modules and data modules that prepare a batch."""


@dataclass
class RowChanges:
    """Counts what may have changed rows: optimizer steps and backward passes."""

    count: int = 0


class RunsAhead:
    """Mixed into a trainer's class while hooks prepare a later batch, for which its counters are
    not right yet."""

    def __getattribute__(self, name: str) -> Any:
        if name == "current_epoch":  # batches are drawn in their epoch
            return self.__dict__["fit_loop"].epoch_progress.current.completed
        # The watchdog's thread may ask how far the run is.
        if (
            name in ("global_step", "fit_loop")
            and threading.current_thread() is threading.main_thread()
        ):
            raise ConfigError(
                f"trainer.{name} is read in a hook that prepares a batch "
                "(on_before_batch_transfer, transfer_batch_to_device, on_after_batch_transfer, "
                f"sparse_inputs). It is called ahead of the batch's step, with an earlier {name}. "
                "Read it in the step, or set prefetch={'depth': 1}."
            )
        return super().__getattribute__(name)


class PrefetchableTable:
    """A sharded collection or embedding whose calls can be prefetched."""

    def __init__(
        self,
        proxy: ShardedProxy,
        lookup: ShardedLookup,
        tables: RunTables,
        streams: Streams,
        changes: RowChanges,
    ) -> None:
        self._proxy = proxy
        self._lookup = lookup
        self._streams = streams
        self._changes = changes
        names = [table.full_name for table in tables.shards.tables_of(lookup.path)]
        weights = [shard.weight for name in names for shard in tables.shards.shards[name]]
        # others have no version
        self._weights = [weight for weight in weights if not weight.is_inference()]
        self._written: list[int] = []
        self._changed = 0
        # Learning rates are read from the param groups, not from the kernels, which some ranks do
        # not have.
        groups = [tables.updates[name].param_group for name in names]
        group_by_label = {group.label: group for group in groups if group is not None}
        self._param_groups = list(group_by_label.values())
        self.on_gpu = streams.on_gpu
        """Whether a call is only begun when its batch is drawn, and prepared when its copy has
        arrived."""
        self.exchanges_counts = lookup.short_path is not None
        """Whether ranks know how many ids they get before these are sent; alike on all ranks."""
        # Whether rows may be looked up before the call. Ids are mapped once, in the order of the
        # calls; FBGEMM's Adam counts forwards, so that one whose rows are not used would count too
        # much.
        self.early = lookup.setup.mapped is None and all(
            tables.updates[name].kind != "fused_lazy" for name in names
        )

    def begin(self, arguments: tuple[Any, ...]) -> BegunFeatures:
        """Begin to check the ids of a call with these arguments."""
        with torch.no_grad():
            return self._lookup.inputs.begin(self._proxy.features(*arguments))

    def prepare(self, begun: BegunFeatures) -> LookupRequest:
        """Return the lookup of such a call; nothing leaves the rank. Waits for a GPU."""
        with torch.no_grad():
            request = self._lookup.prepare(begun)
        if request.late_weights is not None and not isinstance(request.late_weights, LateWeights):
            request.problem = ShardingError(
                f"'{self._lookup.path}' is called with ids whose weights need a gradient and were "
                "computed before the step, from the parameters of an earlier one. Compute them in "
                "the step."
            )
        return request

    def give_weights(self, request: LookupRequest, arguments: tuple[Any, ...]) -> None:
        """Give a request the weights that it was prepared without."""
        request.late_weights = self._proxy.features(*arguments).weights()

    def note_call(self, request: LookupRequest) -> None:
        """The user's code makes this call now."""
        self._lookup.note_call(request)

    def look_up(self, request: LookupRequest) -> LookedUp:
        """Collective. Look up ids that have arrived."""
        return self._lookup.look_up(request)

    def zeros(self, arguments: tuple[Any, ...], looked_up: LookedUp) -> LookedUp:
        """Return zeros as a call with these arguments returns rows. Their gradients reach
        `looked_up`."""
        return self._lookup.outputs.zeros(self._proxy.features(*arguments), looked_up)

    def state(self) -> Any:
        """Return what changes when rows may have, alike on all ranks: grad mode, frozen tables,
        rates, updates.

        Raises ShardingError: rows were written to otherwise, inside of the step.
        """
        with without_guard():
            written = versions_of(self._weights)
        changed = self._changes.count
        # Updates write too, and are counted: new versions without one are writes of the user's
        # step.
        if changed == self._changed and self._written not in ([], written):
            raise ShardingError(
                f"rows of '{self._lookup.path}' were written to inside of the step before they are "
                "looked up in it, and by no optimizer. Write to them in a hook before the step, or "
                "set prefetch={'depth': 1}."
            )
        self._written = written
        self._changed = changed
        return (
            self._lookup.state(),
            [float(group.group["lr"]) for group in self._param_groups],
            changed,
        )

    def begin_step(self) -> None:
        """Forget how often rows were written to in the step before."""
        self._written = []


class Prefetching:
    """The prefetching of one run, in Lightning's loops and in the tables' proxies until
    `release`."""

    def __init__(
        self,
        strategy: DDPStrategy,
        module: LightningModule,
        tables: RunTables,
        options: PrefetchOptions,
        consensus: Consensus,
        end: EndPolicy,
    ) -> None:
        trainer = module.trainer
        self._strategy = strategy
        self._module = module
        self._end = end
        self._changes = RowChanges()
        self._streams = Streams(strategy.root_device)
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        movers = [mover for mover in (module, datamodule) if mover is not None]
        hooks = []
        for mover in movers:
            hooks += [hook for hook in TRANSFER_HOOKS if is_overridden(hook, mover)]
        self._moves_itself = "transfer_batch_to_device" in hooks
        self._sparse_inputs: Callable[[Any], Any] | None = getattr(module, "sparse_inputs", None)
        self._ahead: type | None = None
        """The class of the trainer while code of the user prepares a batch; None: there is none."""
        if hooks or self._sparse_inputs is not None:
            self._ahead = type("Trainer", (RunsAhead, type(trainer)), {})
        self._fetchers: dict[str, PrefetchFetcher] = {}
        lookups = {lookup.path: lookup for lookup in tables.lookups}
        self._tables = {
            path: PrefetchableTable(proxy, lookups[path], tables, self._streams, self._changes)
            for path, proxy in tables.shards.proxies.items()
        }
        groups = tables.shards.groups
        # Where tables are replicated over groups of ranks, ids stay inside of this rank's group.
        group = consensus.ids_group() if groups.num_replicas == 1 else groups.ids
        exchange = IdsExchange(
            start=lambda requests: start_exchange(requests, self._streams.ids, group),
            has_own_group=group is not None,
            preparing=self._streams.preparing,
        )
        record = partial(Recorder, module) if options.computed_ids else None
        self._learner = Learner(consensus, rank_zero_warn, record)
        self.prefetcher = Prefetcher(
            options.depth, consensus, self._tables, exchange, self._learner
        )
        self._undo: list[Callable[[], None]] = [
            replace_fetchers(trainer, self._fetcher).close,
            skip_transfer_hook_when(module, lambda batch: isinstance(batch, ReadyBatch)).close,
        ]
        for optimizer in tables.all_optimizers:
            self._undo.append(optimizer.register_step_post_hook(self._stepped).remove)
        self._proxies: list[tuple[ShardedProxy, Prefetcher | None]] = []
        for proxy in tables.shards.proxies.values():
            # Another Trainer may be running around this one, whose prefetcher `release` puts back.
            self._proxies.append((proxy, proxy.prefetched))
            proxy.prefetched = self.prefetcher
        self._lookups = tables.lookups
        for lookup in self._lookups:
            lookup.on_rows_arrived = self.prefetcher.rows_arrived
        if self._sparse_inputs is not None:
            self._undo.append(self._override_sparse_inputs(self._sparse_inputs))

    def _override_sparse_inputs(self, call: Callable[[Any], Any]) -> Callable[[], None]:
        """Let the module's `sparse_inputs` return what it returned when a batch was fetched;
        returns an undo."""

        def prefetched_or_called(batch: Any) -> Any:
            current = self.prefetcher.current
            is_current = current is not None and has_same_leaves(batch, current.batch)
            if current is not None and is_current:
                return current.roots.sparse_inputs
            return call(batch)

        # The user's step calls self.sparse_inputs(batch) itself. During the run an instance
        # attribute hides that method, so that the call returns the very objects whose ids were sent
        # when the batch was fetched. It is written past nn.Module's __setattr__, which refuses it
        # where sparse_inputs is a submodule.
        attributes = self._module.__dict__
        hidden = attributes.get("sparse_inputs")
        attributes["sparse_inputs"] = prefetched_or_called

        def undo() -> None:
            del attributes["sparse_inputs"]
            if hidden is not None:
                attributes["sparse_inputs"] = hidden

        return undo

    def _stepped(self, *_: Any) -> None:
        self._changes.count += 1

    def _fetcher(self, stage: RunningStage) -> PrefetchFetcher:
        kind = KINDS[stage]
        if kind in self._fetchers:  # Lightning takes a new one for every run of an evaluation
            self._fetchers[kind].drop()
        self._fetchers[kind] = PrefetchFetcher(kind, self.prefetcher, self._end, self._make_ready)
        return self._fetchers[kind]

    def _make_ready(self, in_flight: InFlightBatch, batch: Any, dataloader_idx: int) -> None:
        ahead = nullcontext() if self._ahead is None else self._ahead_of_step(self._ahead)
        with self._streams.copying(batch), ahead:
            batch = self._strategy.precision_plugin.convert_input(batch)
            batch = call_transfer_hook(self._module, batch, dataloader_idx)
            if self._streams.on_gpu:  # last: conversions and hooks return memory that is not pinned
                batch = pin(batch)
                # A user's transfer_batch_to_device must get what the hooks have returned, on the
                # host.
                if not self._moves_itself:
                    batch = move_jagged(batch, self._strategy.root_device)
            in_flight.batch = self._strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)
            sparse_inputs = None
            if self._sparse_inputs is not None:
                sparse_inputs = self._sparse_inputs(in_flight.batch)
        in_flight.roots = BatchRoots(in_flight.batch, sparse_inputs)
        in_flight.copied = self._streams.copied(in_flight.roots)
        if self._learner.needs_objects(in_flight.kind):
            in_flight.objects = BatchObjects(in_flight.roots)

    def _ahead_of_step(self, kind: type) -> Patches:
        """Return the context in which the user's hooks are called ahead of the step that they are
        for."""
        patches = Patches()
        trainer = self._module.trainer
        if trainer.training:  # counters stay in an evaluation
            patches.replace_class(trainer, kind)
        return patches

    def take(self, ready: ReadyBatch) -> Any:
        """Return the batch for its step, which begins now."""
        current = self.prefetcher.current
        if current is not None:
            self._streams.hand_over(current.roots, current.copied)
        return ready.batch

    @contextmanager
    def step(self, batch: Any, has_backward: bool) -> Iterator[None]:
        """Collective. Run the user's step of `batch` inside of the context."""
        for table in self._tables.values():
            table.begin_step()
        self.prefetcher.begin_step(batch)
        try:
            with self.prefetcher.recording():
                yield
        except Exception as failure:
            self.prefetcher.abandon(failure)
            difference = self.prefetcher.differing.failure
            if difference not in (None, failure):  # the step went on with zeros
                raise difference from failure
            raise
        self.prefetcher.end_step(has_backward)

    def before_backward(self) -> None:
        """Collective. Prepare for a backward that begins now."""
        # Tables with a fused optimizer are updated inside of backward: rows that were looked up
        # before are stale.
        self._changes.count += 1
        with LIBRARY_OPERATIONS:  # under manual optimization the step goes on
            self.prefetcher.before_backward()

    def num_waiting(self) -> int:
        """Return how many lookups of the step were prefetched, and are made at its end if it does
        not call them."""
        return self.prefetcher.num_waiting()

    def release(self, failed: bool) -> None:
        """Disconnect it. What is in flight is waited for, unless a step failed."""
        self.prefetcher.failed |= failed
        for fetcher in self._fetchers.values():
            fetcher.drop()
        for proxy, previous in self._proxies:
            proxy.prefetched = previous
        for lookup in self._lookups:
            lookup.on_rows_arrived = None
        while self._undo:
            self._undo.pop()()
        training = self.prefetcher.counts.get("training 0")
        if training is not None and not self.prefetcher.failed:
            rank_zero_info(f"torchrec_sharded: prefetched the ids of {training} in training steps.")
