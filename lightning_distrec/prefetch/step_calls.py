"""Learns from the first steps of a kind which calls are prefetched in later ones, alike on all
ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning_distrec.prefetch.batch_objects import BatchObjects
from lightning_distrec.prefetch.computed_calls import ComputedCall, Recording, Trial
from lightning_distrec.prefetch.in_flight_batch import InFlightBatch
from lightning_distrec.prefetch.recorded_calls import (
    PrefetchedCall,
    RecordedCall,
    StepCalls,
    agree_on_calls,
)
from lightning_distrec.prefetch.recorder import Recorder
from lightning_distrec.prefetch.sources import BatchRoots
from lightning_distrec.ranks import Ranks
from lightning_distrec.recorded_step import LIBRARY_OPERATIONS


@dataclass
class LookupCounts:
    """Lookups of one kind of step."""

    lookups: int = 0
    ahead: int = 0
    """Those whose ids were sent before their step began."""

    def __str__(self) -> str:
        return f"{self.ahead:,} of {self.lookups:,} lookups"


Record = Callable[[BatchObjects, BatchRoots], Recorder]
"""Begins to record the operations of a step: of the objects of its batch before it, and the
batch."""


class Learner:
    """The calls of all kinds of steps. warn: called with the reason why a table is not
    prefetched."""

    def __init__(self, ranks: Ranks, warn: Callable[[str], None], record: Record | None) -> None:
        self.calls: dict[str, StepCalls] = {}
        """Kind of step -> its calls that are prefetched, alike on all ranks."""
        self.max_calls = 0
        """The most that any kind has."""
        self.is_recording = False
        self._ranks = ranks
        self._warn = warn
        self._record = record
        self._has_reported_unlike = False
        self._trials: dict[str, Trial] = {}
        """Kind of step -> what is known of its computed calls, until its trial is over."""
        self._recorder: Recorder | None = None
        self._recorded: list[RecordedCall] = []
        self._batch: InFlightBatch | None = None

    def needs_objects(self, kind: str) -> bool:
        """Whether a batch that is drawn now is recorded."""
        return kind not in self.calls or kind in self._trials

    # -- a step

    def begin_step(self, batch: InFlightBatch) -> None:
        """Begin to record the step of `batch`."""
        self.is_recording = True
        self._batch = batch
        self._recorded = []
        if batch.objects is None:
            batch.objects = BatchObjects(batch.roots)
        self._recorder = None if self._record is None else self._record(batch.objects, batch.roots)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the operations of the step inside of the context, where they are to be."""
        if self._recorder is None:
            yield
            return
        # Rows are made by our own operations, which the recorder does not see: whoever makes them
        # reports them to it.
        LIBRARY_OPERATIONS.note_rows = self._recorder.note_rows
        try:
            with self._recorder.recording():
                yield
        finally:
            LIBRARY_OPERATIONS.note_rows = None

    def note_call(self, path: str, arguments: tuple[Any, ...]) -> None:
        """Note a call that the step makes now."""
        assert self._batch is not None
        assert self._batch.objects is not None
        call = RecordedCall(path, arguments, self._batch.objects, self._recorder)
        self._recorded.append(call)

    def end_step(self) -> bool:
        """Collective. Learn from the step, where it was recorded. Returns whether it was the first
        of its kind."""
        if not self.is_recording or self._batch is None:
            return False
        batch = self._batch
        recorded = self._recorded
        self.drop()
        assert batch.objects is not None
        is_first = batch.kind not in self.calls
        if is_first:
            self._learn_first(batch.kind, batch.objects, recorded)
        trial = self._trials.get(batch.kind)
        if trial is not None:
            recordings: dict[str, list[Recording | str]] = {}
            for call in recorded:
                recordings.setdefault(call.path, []).append(call.recording or call.reason)
            if trial.end_step(recordings, batch.objects.tensors_with_paths):
                self._learn_trial(batch.kind, batch.objects, trial)
        # They hold all tensors of the batch, whose memory would last until another step is
        # recorded.
        batch.objects = None
        return is_first

    def drop(self) -> None:
        """Forget the step that is running."""
        self.is_recording = False
        self._recorded = []
        self._recorder = None
        self._batch = None

    def _learn_first(self, kind: str, objects: BatchObjects, recorded: list[RecordedCall]) -> None:
        calls, reasons, trial = agree_on_calls(recorded, self._ranks)
        self._report(kind, reasons)
        self._prefetch(kind, StepCalls(calls, objects, not reasons and not trial.calls))
        if trial.calls:
            self._trials[kind] = trial

    def _learn_trial(self, kind: str, objects: BatchObjects, trial: Trial) -> None:
        del self._trials[kind]
        usable = trial.agree(self._ranks)
        self._report(kind, trial.reasons)
        calls = [*self.calls[kind].calls, *usable]
        prefetched = {call.path for call in calls}
        is_complete = not trial.reasons and prefetched.issuperset(trial.order)
        self._prefetch(kind, StepCalls(calls, objects, is_complete, trial))

    def _prefetch(self, kind: str, calls: StepCalls) -> None:
        self.calls[kind] = calls
        self.max_calls = max(self.max_calls, len(calls.calls))

    # -- what is reported

    def _report(self, kind: str, reasons: dict[str, str]) -> None:
        for path, reason in reasons.items():
            self._warn(
                f"{kind}: '{path}' is looked up as it is called, without prefetching: {reason}. To "
                "change that, make its input in a method sparse_inputs(batch) of the module."
            )

    def abandon(self, kind: str, differing: PrefetchedCall, difference: str) -> None:
        """Look up a table as it is called from now on: on all ranks this call has differed from
        what was prefetched."""
        calls = self.calls[kind].calls
        if differing in calls:  # batches that were prepared before still have it
            calls[calls.index(differing)] = ComputedCall(differing.path, 0, difference)
            cause = f"from now on, since the step has called it with {difference}"
            self._report(kind, {differing.path: cause})

    def report_unprepared(self, batch: InFlightBatch) -> None:
        """Report, once, that a batch could not be prepared on this rank, or that a call never will
        be."""
        if batch.preparation_failure and batch.batch is not None and not self._has_reported_unlike:
            self._has_reported_unlike = True
            self._warn(
                f"{batch.kind}: a batch is unlike that of the first step "
                f"({batch.preparation_failure}); it is looked up as its step calls, without "
                "prefetching. Later ones are not reported."
            )
        for call in batch.refused:
            if not call.is_reported:
                call.is_reported = True
                self._report(batch.kind, {call.path: call.refused})
