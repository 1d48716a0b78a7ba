"""Learns from the first steps of a kind which calls are prefetched in later ones, alike on all
ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lightning_distrec.prefetch.batch_objects import BatchObjects, FeatureOrder
from lightning_distrec.prefetch.computed_calls import (
    ComputedCall,
    Trial,
    Variant,
    computed_in,
    replaying,
)
from lightning_distrec.prefetch.recorder import Guards, Number, Recorder, TracedSource
from lightning_distrec.prefetch.sources import (
    BatchRoots,
    JaggedSource,
    LookupCall,
    Source,
    ViewSource,
    is_same_input,
    paths_of,
)
from lightning_distrec.ranks import Ranks
from lightning_distrec.recorded_step import LIBRARY_OPERATIONS

if TYPE_CHECKING:
    from lightning_distrec.prefetch.in_flight_batch import InFlightBatch

PrefetchedCall = LookupCall | ComputedCall


class RecordedCall:
    """A call of a recorded step, and where its arguments came from.

    objects: those of the batch before the step. recorder: of the step's operations; None: they are
    not recorded.
    place: how many calls of this table come before it in the step.
    """

    def __init__(
        self,
        path: str,
        arguments: tuple[Any, ...],
        objects: BatchObjects,
        recorder: Recorder | None = None,
        place: int = 0,
    ) -> None:
        self.path, self.place = path, place
        self.reason = ""
        """Why it cannot be prefetched; "" if it can."""
        self.needs_trial = False
        """Whether later steps may call with something else: it is computed, or Python has read a
        value before."""
        self.call: LookupCall | ComputedCall | None = None
        """The call, where all of its arguments were found in the batch."""
        self.variant: Variant | None = None
        """Of a recorder, where it can be prefetched."""
        # each call narrows its own numbers
        guards = {} if recorder is None else deepcopy(recorder.guards)

        def compute(tensor: Any) -> TracedSource | str:
            assert recorder is not None
            return recorder.read_refusal or recorder.trace(tensor, guards)

        sources: list[Source] = []
        for i, argument in enumerate(arguments):
            source = objects.source_of(
                argument, arguments[0] if i else None, compute if recorder else None
            )
            if isinstance(source, str):
                self.reason = self.reason or source
            else:
                sources.append(source)
        if not self.reason:
            self.call = call = LookupCall(path, tuple(sources))
            if recorder is not None:
                self._learn_operations(call, arguments, recorder, guards)

    def _learn_operations(
        self, call: LookupCall, arguments: tuple[Any, ...], recorder: Recorder, guards: Guards
    ) -> None:
        computed = computed_in(call.arguments)
        if not computed:
            # Other values that Python reads may decide too, but rarely do: a loss that is logged, a
            # check for NaN.
            condition = recorder.trace(None, guards)
            if isinstance(condition, TracedSource) and condition.paths:
                computed = [condition]
        self.needs_trial = bool(computed)
        self.variant = Variant(call, recorder.roots, computed, guards if computed else None)
        views = [source for source in call.arguments if isinstance(source, ViewSource)]
        if not computed_in(call.arguments) and any(
            view.form == "narrow" or recorder.has_read for view in views
        ):
            # The end of x[:, :n] may depend on the batch: on its width, or on a number that Python
            # has read.
            traced = [
                recorder.trace(argument, guards) if isinstance(source, ViewSource) else source
                for argument, source in zip(arguments, call.arguments, strict=True)
            ]
            sources = tuple(source for source in traced if not isinstance(source, str))
            if len(sources) == len(traced):
                computed = computed_in(sources)
                self.needs_trial |= any(
                    isinstance(part, Number) and part.reads for s in computed for part in s.parts
                )
                self.variant = Variant(
                    LookupCall(self.path, sources), recorder.roots, computed, guards
                )
                self.call = ComputedCall(self.path, self.place, call)
                self.call.learn(self.variant)
        if self.needs_trial and not self._repeats(self.variant, arguments, recorder.roots):
            self.reason, self.call, self.variant = (
                "its input is not what its operations compute",
                None,
                None,
            )

    def _repeats(self, variant: Variant, arguments: tuple[Any, ...], roots: BatchRoots) -> bool:
        """Whether repeating the operations makes the same arguments: no value went past the
        recorder."""
        try:
            with replaying():
                repeated = variant.get(roots)
        except Exception:  # the step itself has written to what it read, for example
            return False
        finally:
            # The next call is repeated from the beginning: by then the step may have written to
            # what it is made of.
            roots.memo.clear()
        pairs = zip(arguments, repeated, strict=True)
        return all(is_same_input(argument, computed, torch.equal) for argument, computed in pairs)


class StepCalls:
    """The calls of one kind of step that are prefetched, alike on all ranks.

    objects: of the batch of the first step. placed_paths: tables of which some calls are not
    prefetched: a call is distinguished by how many come before it. regular: tables of which each
    step makes as many calls.
    is_complete: whether the step makes no other calls.
    """

    def __init__(
        self,
        calls: list[PrefetchedCall],
        objects: BatchObjects,
        placed_paths: frozenset[str] = frozenset(),
        regular: frozenset[str] = frozenset(),
        is_complete: bool = False,
    ) -> None:
        self.calls, self.placed_paths, self.regular, self.is_complete = (
            calls,
            placed_paths,
            regular,
            is_complete,
        )
        self.forms = [0] * len(calls)
        """Of each call the types of its last lookup on this rank."""
        sources = [source for call in calls for source in call.arguments]
        names = {name for call in calls for name in call.path.split(".")}
        names |= {
            key for source in sources if isinstance(source, JaggedSource) for key in source.keys
        }
        self.order = FeatureOrder(
            objects, [path for source in sources for path in paths_of(source)], names
        )

    def reads_written_tensors(self) -> bool:
        """Whether a call is computed from tensors of the module that are written to between steps,
        or in them."""
        return any(
            isinstance(call, ComputedCall) and call.reads_written_tensors() for call in self.calls
        )


@dataclass
class LookupCounts:
    """Lookups of one kind of step."""

    lookups: int = 0
    ahead: int = 0
    """Those whose ids were sent before their step began."""

    def __str__(self) -> str:
        return f"{self.ahead:,} of {self.lookups:,} lookups"


def agree_on_calls(
    recorded: list[RecordedCall], ranks: Ranks
) -> tuple[list[PrefetchedCall], dict[str, str], Trial]:
    """Collective. Return what ranks agree on after the first step of a kind.

    The calls that are prefetched from now on, in one order; table -> why it is not prefetched; the
    trial of those of which later steps show whether they are. Of a table that is in no trial all
    calls are prefetched, or none.
    """
    # For each rank: path, description of the call, reason, whether it needs a trial; in the order
    # of its calls.
    gathered = ranks.all_gather([
        (call.path, repr(call.call), call.reason, call.needs_trial) for call in recorded
    ])
    order, reasons, tried = [call[0] for call in gathered[0]], dict[str, str](), list[str]()
    for path in sorted({call[0] for calls in gathered for call in calls}):
        lists = [[call for call in calls if call[0] == path] for calls in gathered]
        refused = [reason for calls in lists for _, _, reason, _ in calls if reason]
        if any(needs_trial for calls in lists for _, _, _, needs_trial in calls):
            tried.append(path)
        elif refused:
            reasons[path] = refused[0]
        elif any(calls != lists[0] for calls in lists):
            reasons[path] = "the ranks call it with different parts of their batches"
    remaining: dict[str, list[PrefetchedCall]] = {}
    for call in recorded:
        if call.call is not None:
            remaining.setdefault(call.path, []).append(call.call)
    # Every rank has as many calls of these tables. All list them in rank 0's order, in which ids
    # are exchanged.
    prefetched = [remaining[path].pop(0) for path in order if path not in {*reasons, *tried}]
    return prefetched, reasons, Trial(tried, order)


Record = Callable[[BatchObjects, BatchRoots], Recorder]
"""Begins to record the operations of a step: of the objects of its batch before it, and the
batch."""


class Learner:
    """The calls of all kinds of steps. warn: called with the reason why a table is not
    prefetched."""

    def __init__(self, ranks: Ranks, warn: Callable[[str], None], record: Record | None) -> None:
        self.calls: dict[str, StepCalls] = {}
        """Kind of step -> its calls that are prefetched, alike on all ranks."""
        self.is_recording = False
        self._ranks, self._warn, self._record = ranks, warn, record
        self._has_reported_unlike = False
        self._trials: dict[str, Trial] = {}
        """Kind of step -> what is known of its computed calls, until its trial is over."""
        self._recorder: Recorder | None = None
        self._recorded: list[RecordedCall] = []
        self._batch: InFlightBatch | None = None

    def needs_objects(self, kind: str) -> bool:
        """Whether a batch that is drawn now may be recorded."""
        return kind not in self.calls or kind in self._trials

    # -- a step

    def begin_step(self, batch: "InFlightBatch") -> None:
        """Decide whether the step of `batch` is recorded."""
        self.is_recording = self.needs_objects(batch.kind) or any(
            call.can_learn for call in batch.unready
        )
        if not self.is_recording:
            return
        self._batch, self._recorded = batch, []
        # a batch that is unlike the others is recorded again, long after the first steps
        if batch.objects is None:
            batch.objects = BatchObjects(batch.roots)
        self._recorder = None if self._record is None else self._record(batch.objects, batch.roots)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the operations of the step inside of the context."""
        assert self._recorder is not None
        # Rows are made by our own operations, which the recorder does not see: whoever makes them
        # reports them to it.
        LIBRARY_OPERATIONS.note_rows = self._recorder.note_rows
        try:
            with self._recorder.recording():
                yield
        finally:
            LIBRARY_OPERATIONS.note_rows = None

    @property
    def records_operations(self) -> bool:
        """Whether the operations of the step that is running are to be recorded."""
        return self.is_recording and self._recorder is not None

    def note_call(self, path: str, arguments: tuple[Any, ...]) -> None:
        """Note a call that the step makes now."""
        assert self._batch is not None
        assert self._batch.objects is not None
        place = sum(call.path == path for call in self._recorded)
        self._recorded.append(
            RecordedCall(path, arguments, self._batch.objects, self._recorder, place)
        )

    def end_step(self) -> bool:
        """Collective. Learn from the step, where it was recorded. Returns whether it was the first
        of its kind."""
        batch, recorded = self._batch, self._recorded
        if not self.is_recording or batch is None:
            return False
        self.is_recording, self._recorded, self._recorder = False, [], None
        is_first = batch.kind not in self.calls
        variants: dict[str, list[Variant | str]] = {}
        for recorded_call in recorded:
            variants.setdefault(recorded_call.path, []).append(
                recorded_call.variant or recorded_call.reason
            )
        if is_first:
            self._learn_first(batch, recorded, variants)
        elif (trial := self._trials.get(batch.kind)) is not None:
            if trial.end_step(variants):
                self._learn_trial(batch, self._trials.pop(batch.kind))
        else:
            for call in batch.unready:
                # A slice, which is empty where this step has made fewer calls.
                for variant in variants.get(call.path, [])[call.place : call.place + 1]:
                    call.learn(variant)
        # They hold all tensors of the batch, whose memory would last until another step is
        # recorded.
        batch.objects = self._batch = None
        return is_first

    def drop(self) -> None:
        """Forget the step that is running."""
        self.is_recording, self._recorded, self._recorder, self._batch = False, [], None, None

    def _learn_first(
        self,
        batch: "InFlightBatch",
        recorded: list[RecordedCall],
        variants: dict[str, list[Variant | str]],
    ) -> None:
        assert batch.objects is not None
        calls, reasons, trial = agree_on_calls(recorded, self._ranks)
        self._report(batch.kind, reasons)
        self.calls[batch.kind] = StepCalls(
            calls, batch.objects, is_complete=not reasons and not trial.calls
        )
        if trial.calls:
            self._trials[batch.kind] = trial
            trial.end_step(variants)

    def _learn_trial(self, batch: "InFlightBatch", trial: Trial) -> None:
        assert batch.objects is not None
        usable, reasons = trial.agree(self._ranks)
        self._report(batch.kind, reasons)
        calls = self.calls[batch.kind]
        untried = {path for path in trial.order if path not in trial.calls}
        was_complete = untried <= {call.path for call in calls.calls}
        self.calls[batch.kind] = StepCalls(
            [*calls.calls, *usable],
            batch.objects,
            frozenset(reasons),
            frozenset(trial.calls),
            was_complete and not reasons,
        )

    def _report(self, kind: str, reasons: dict[str, str]) -> None:
        for path, reason in reasons.items():
            self._warn(
                f"{kind}: '{path}' is looked up as it is called, without prefetching: {reason}. "
                "To change that, make "
                "its input in a method sparse_inputs(batch) of the module."
            )

    def abandon(self, kind: str, differing: PrefetchedCall, difference: str) -> None:
        """Look up a table as it is called from now on: on all ranks this call has differed from
        what was prefetched."""
        calls = self.calls[kind].calls
        if differing in calls:  # batches that were prepared before still have it
            refused = ComputedCall(differing.path, 0)
            refused.refused, refused.is_reported = difference, True
            calls[calls.index(differing)] = refused
            self._report(
                kind, {refused.path: f"from now on, since the step has called it with {difference}"}
            )

    def report_unlike(self, batch: "InFlightBatch") -> None:
        """Report, for the first of them, that a batch could not be prepared on this rank."""
        if batch.batch is not None and not self._has_reported_unlike:
            self._has_reported_unlike = True
            self._warn(
                f"{batch.kind}: a batch is unlike that of the first step "
                f"({batch.preparation_failure}); it is looked "
                "up as its step calls, without prefetching. Later ones are not reported."
            )

    def report_refused(self, batch: "InFlightBatch") -> None:
        """Collective where a rank has found out that it cannot compute a call ahead. Report it,
        once for each call."""
        refused = [call for call in batch.refused_calls() if not call.is_reported]
        if not refused:
            return
        # All ranks come here: the agreed sizes name the refused calls, and `is_reported` is set
        # below alone.
        gathered = self._ranks.all_gather([call.refused for call in refused])
        for call, *reasons in zip(refused, *gathered, strict=True):
            call.is_reported = True
            call.refused = call.refused or next(filter(None, reasons))
            self._report(batch.kind, {call.path: next(filter(None, reasons))})
