"""Joins the pipeline with the tables and with Lightning's loops, for the time of one run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_distrec._compat.lightning import call_transfer_hook, replace_fetchers, skip_transfer_hook_when
from lightning_distrec._compat.torch import version_of
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import ShardingError
from lightning_distrec.pipeline.even_batches import EndPolicy
from lightning_distrec.pipeline.fetcher import PrefetchFetcher, ReadyBatch
from lightning_distrec.pipeline.in_flight_batch import InFlightBatch
from lightning_distrec.pipeline.provenance import Leaves, Roots
from lightning_distrec.pipeline.sparse_pipeline import SparsePipeline
from lightning_distrec.pipeline.streams import Streams
from lightning_distrec.sharding.lookup.ids_exchange import IdsExchange
from lightning_distrec.sharding.lookup.request import LookupRequest
from lightning_distrec.sharding.lookup.sharded_lookup import LookedUp, ShardedLookup
from lightning_distrec.sharding.proxies import ShardedProxy
from lightning_distrec.strategies.tables.table_setup import TableSetup

KINDS = {
    RunningStage.TRAINING: "training",
    RunningStage.SANITY_CHECKING: "validation",
    RunningStage.VALIDATING: "validation",
    RunningStage.TESTING: "test",
    RunningStage.PREDICTING: "prediction",
}


class PrefetchableTable:
    """A sharded collection or embedding whose calls can be foreseen.

    changes: counts what may have changed rows.
    """

    def __init__(
        self,
        stand_in: ShardedProxy,
        lookup: ShardedLookup,
        tables: TableSetup,
        streams: Streams,
        changes: Callable[[], int],
    ) -> None:
        self._stand_in = stand_in
        self._lookup = lookup
        self._streams = streams
        self._changes = changes
        names = [table.full_name for table in tables.shards.tables_of(lookup.path)]
        self._weights = [shard.weight for name in names for shard in tables.shards.shards[name]]
        self._written: list[int | None] = []
        self._changed = 0
        # Of the groups, not of the kernels, which some ranks do not have.
        self._owners = [param_group for name in names if (param_group := tables.updates[name].param_group) is not None]
        # FBGEMM's Adam counts forwards, so that one whose rows are not used would count too much.
        self.early = all(tables.updates[name].kind != "fused_lazy" for name in names)

    def prepare(self, arguments: tuple[Any, ...]) -> LookupRequest:
        """Return the lookup of a call with these arguments; nothing leaves the rank."""
        with self._streams.exchanging(), torch.no_grad():
            return self._lookup.prepare(self._stand_in.features(*arguments))

    def note(self, request: LookupRequest) -> None:
        """The call is made now."""
        self._lookup.note(request)

    def look_up(self, request: LookupRequest) -> LookedUp:
        """Collective. Look up ids that have arrived."""
        return self._lookup.look_up(request)

    def state(self) -> Any:
        """Return what changes when rows may have, alike on all ranks: grad mode, what learns, rates, updates.

        Raises ShardingError: rows were written to otherwise, inside of the step.
        """
        written, changed = [version_of(weight) for weight in self._weights], self._changes()
        if changed == self._changed and self._written not in ([], written):
            raise ShardingError(
                f"rows of '{self._lookup.path}' were written to inside of the step, before they are looked up in it, "
                "by no optimizer. Write to them in a hook before the step, or set pipeline={'depth': 1}."
            )
        self._written, self._changed = written, changed
        return self._lookup.state(), [float(param_group.group["lr"]) for param_group in self._owners], changed

    def begin_step(self) -> None:
        """Forget how often rows were written to before."""
        self._written = []


class Pipelining:
    """The look-ahead of one run; `undo` takes it off."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        tables: TableSetup,
        depth: int,
        consensus: Consensus,
        end: EndPolicy,
        move: Callable[[Any, int], Any],
        device: torch.device,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._end = end
        self._move = move
        self._changes = 0
        self._streams = Streams(device)
        self._fetchers: dict[str, PrefetchFetcher] = {}
        lookups = {lookup.path: lookup for lookup in tables.lookups}
        targets = {
            path: PrefetchableTable(stand_in, lookups[path], tables, self._streams, lambda: self._changes)
            for path, stand_in in tables.shards.proxies.items()
        }
        group = consensus.ids_group()
        self.pipeline = SparsePipeline(
            depth,
            consensus,
            targets,  # type: ignore[arg-type]
            lambda requests: IdsExchange(requests, stream=self._streams.ids, group=group),
            rank_zero_warn,
            ids_have_their_own_group=group is not None,
        )
        self._undo: list[Callable[[], None]] = [
            replace_fetchers(trainer, self._fetcher),
            skip_transfer_hook_when(module, lambda batch: isinstance(batch, ReadyBatch)),
        ]
        self._tables = targets
        self._connect(tables, lookups)

    def _connect(self, tables: TableSetup, lookups: dict[str, ShardedLookup]) -> None:
        for path, stand_in in tables.shards.proxies.items():
            self._put(stand_in, "foreseen", lambda arguments, path=path: self.pipeline.call(path, arguments))
            self._put(lookups[path], "rows_arrived", self.pipeline.rows_are_here)
        for optimizer in tables.optimizers:
            self._undo.append(optimizer.register_step_post_hook(self._stepped).remove)
        declare = getattr(self._module, "sparse_inputs", None)
        self._declare: Callable[[Any], Any] | None = declare
        if declare is not None:
            self._put(self._module, "sparse_inputs", self._declared)

    def _stepped(self, *_: Any) -> None:
        self._changes += 1

    def _put(self, on: Any, name: str, value: Any) -> None:
        before = on.__dict__.get(name)
        on.__dict__[name] = value

        def undo() -> None:
            del on.__dict__[name]
            if before is not None:
                on.__dict__[name] = before

        self._undo.append(undo)

    def _declared(self, batch: Any) -> Any:
        """What the user's sparse_inputs returned for this batch ahead of its step; else call it."""
        flight = self.pipeline.current
        if flight is not None and batch is flight.batch:
            return flight.roots.sparse_inputs
        assert self._declare is not None
        return self._declare(batch)

    def _fetcher(self, stage: RunningStage) -> PrefetchFetcher:
        kind = KINDS[stage]
        if kind in self._fetchers:  # Lightning takes a new one for every run of an evaluation
            self._fetchers[kind].drop()
        self._fetchers[kind] = PrefetchFetcher(kind, self.pipeline, self._end, self._make_ready)
        return self._fetchers[kind]

    def _make_ready(self, flight: InFlightBatch, batch: Any, dataloader_idx: int) -> None:
        with self._streams.copying():
            batch = self._trainer.precision_plugin.convert_input(self._streams.pinned(batch))
            batch = call_transfer_hook(self._module, batch, dataloader_idx)
            flight.batch = self._move(batch, dataloader_idx)
            declared = None if self._declare is None else self._declare(flight.batch)
        flight.roots = Roots(flight.batch, declared)
        flight.copied = self._streams.copied(flight.roots)
        if not self.pipeline.knows(flight.kind):
            flight.leaves = Leaves(flight.roots)

    def take(self, handed: ReadyBatch) -> Any:
        """Return the batch for its step, which begins now."""
        flight = self.pipeline.current
        if flight is not None:
            self._streams.hand_over(flight.roots, flight.copied)
        return handed.batch

    @contextmanager
    def step(self, batch: Any, has_backward: bool) -> Iterator[None]:
        """Collective. The user's step of `batch` runs inside of the context."""
        for table in self._tables.values():
            table.begin_step()
        self.pipeline.begin_step(batch)
        try:
            yield
        except BaseException as failure:
            self.pipeline.abandon(failure)
            raise
        self.pipeline.end_step(has_backward)

    def before_backward(self) -> None:
        """Collective. A backward begins."""
        self._changes += 1
        self.pipeline.before_backward()

    def release(self, failed: bool) -> None:
        """Take the look-ahead off; what is on its way is waited for, but after a failure."""
        self.pipeline.failed |= failed
        for fetcher in self._fetchers.values():
            fetcher.drop()
        while self._undo:
            self._undo.pop()()
        of_training = self.pipeline.counts.get("training 0")
        if of_training is not None and not self.pipeline.failed:
            rank_zero_info(f"torchrec_sharded: ids of {of_training} of training travelled ahead of their step.")
