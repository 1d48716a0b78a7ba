"""Learns from steps which calls of tables are prefetched: the first of each kind, a trial, and unlike batches later."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_distrec.own_operations import OWN
from lightning_distrec.prefetch.batch_objects import BatchObjects
from lightning_distrec.prefetch.computed_calls import Trial, Variant
from lightning_distrec.prefetch.in_flight_batch import InFlightBatch
from lightning_distrec.prefetch.recorder import Recorder
from lightning_distrec.prefetch.sources import BatchRoots
from lightning_distrec.prefetch.step_calls import RecordedCall, StepCalls, agree_on_calls
from lightning_distrec.ranks import Ranks

Record = Callable[[BatchObjects, BatchRoots], Recorder]
"""Begins to record the operations of a step: of the objects of its batch before it, and the batch."""


class Learner:
    """The calls of all kinds of steps. warn: called with the reason why a table is not prefetched."""

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

    def begin_step(self, batch: InFlightBatch) -> None:
        """Decide whether the step of `batch` is recorded."""
        self.is_recording = self.needs_objects(batch.kind) or any(call.can_learn for call in batch.unready)
        if not self.is_recording:
            return
        self._batch, self._recorded = batch, []
        if batch.objects is None:  # a batch that is unlike the others is recorded again, long after the first steps
            batch.objects = BatchObjects(batch.roots)
        self._recorder = None if self._record is None else self._record(batch.objects, batch.roots)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the operations of the step inside of the context."""
        assert self._recorder is not None
        # Rows are made by our own operations, which the recorder does not see: whoever makes them reports them to it.
        OWN.note_rows = self._recorder.note_rows
        try:
            with self._recorder.recording():
                yield
        finally:
            OWN.note_rows = None

    @property
    def records_operations(self) -> bool:
        """Whether the operations of the step that is running are to be recorded."""
        return self.is_recording and self._recorder is not None

    def note_call(self, path: str, arguments: tuple[Any, ...]) -> None:
        """Note a call that the step makes now."""
        assert self._batch is not None
        assert self._batch.objects is not None
        place = sum(call.path == path for call in self._recorded)
        self._recorded.append(RecordedCall(path, arguments, self._batch.objects, self._recorder, place))

    def end_step(self) -> bool:
        """Collective. Learn from the step, where it was recorded. Returns whether it was the first of its kind."""
        batch, recorded = self._batch, self._recorded
        if not self.is_recording or batch is None:
            return False
        self.is_recording, self._recorded, self._recorder = False, [], None
        is_first = batch.kind not in self.calls
        variants: dict[str, list[Variant | str]] = {}
        for recorded_call in recorded:
            variants.setdefault(recorded_call.path, []).append(recorded_call.variant or recorded_call.reason)
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
        # They hold all tensors of the batch, whose memory would last until another step is recorded.
        batch.objects = self._batch = None
        return is_first

    def drop(self) -> None:
        """Forget the step that is running."""
        self.is_recording, self._recorded, self._recorder, self._batch = False, [], None, None

    def _learn_first(
        self, batch: InFlightBatch, recorded: list[RecordedCall], variants: dict[str, list[Variant | str]]
    ) -> None:
        assert batch.objects is not None
        calls, reasons, trial = agree_on_calls(recorded, self._ranks)
        self._report(batch.kind, reasons)
        self.calls[batch.kind] = StepCalls(calls, batch.objects, is_complete=not reasons and not trial.calls)
        if trial.calls:
            self._trials[batch.kind] = trial
            trial.end_step(variants)

    def _learn_trial(self, batch: InFlightBatch, trial: Trial) -> None:
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
                f"{kind}: '{path}' is looked up as it is called, without prefetching: {reason}. To change that, make "
                "its input in a method sparse_inputs(batch) of the module."
            )

    def report_unlike(self, batch: InFlightBatch) -> None:
        """Report, for the first of them, that a batch could not be prepared on this rank."""
        if batch.batch is not None and not self._has_reported_unlike:
            self._has_reported_unlike = True
            self._warn(
                f"{batch.kind}: a batch is unlike that of the first step ({batch.preparation_failure}); it is looked "
                "up as its step calls, without prefetching. Later ones are not reported."
            )

    def report_refused(self, batch: InFlightBatch) -> None:
        """Collective where a rank has found out that it cannot compute a call ahead. Report it, once for each call."""
        refused = [call for call in batch.refused_calls() if not call.is_reported]
        if not refused:
            return
        # All ranks come here: the agreed sizes name the refused calls, and `is_reported` is set below alone.
        gathered = self._ranks.all_gather([call.refused for call in refused])
        for call, *reasons in zip(refused, *gathered, strict=True):
            call.is_reported = True
            call.refused = call.refused or next(filter(None, reasons))
            self._report(batch.kind, {call.path: next(filter(None, reasons))})
