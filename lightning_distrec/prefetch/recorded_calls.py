"""The calls of a step that was recorded, and those that later steps of its kind prefetch."""

from dataclasses import dataclass
from typing import Any

import torch

from lightning_distrec.prefetch.batch_objects import BatchObjects, FeatureOrder
from lightning_distrec.prefetch.computed_calls import (
    ComputedCall,
    Recording,
    Sizes,
    Trial,
    have_known_sizes,
    replaying,
)
from lightning_distrec.prefetch.recorder import READS_BATCH, Recorder
from lightning_distrec.prefetch.sources import (
    BatchRoots,
    JaggedSource,
    LookupCall,
    Path,
    PathSource,
    Source,
    ViewSource,
    is_same_input,
)
from lightning_distrec.ranks import Ranks

PrefetchedCall = LookupCall | ComputedCall


class RecordedCall:
    """A call of a recorded step, and where its arguments came from.

    objects: those of the batch before the step. recorder: of the step's operations; None: they are
    not recorded.
    """

    def __init__(
        self,
        path: str,
        arguments: tuple[Any, ...],
        objects: BatchObjects,
        recorder: Recorder | None = None,
    ) -> None:
        self.path = path
        self.reason = ""
        """Why it cannot be prefetched; "" if it can."""
        self.recording: Recording | None = None
        self._objects = objects
        self._recorder = recorder
        sources: list[Source] = []
        for argument in arguments:
            # Offsets, lengths and weights come after the ids that they belong to.
            source = self._source_of(argument, arguments[0] if sources else None)
            if isinstance(source, str):
                self.reason = source
                return
            sources.append(source)
        if recorder is not None and recorder.has_read_batch:
            self.reason = READS_BATCH
            return
        self.recording = Recording(LookupCall(path, tuple(sources)))
        if self.needs_trial and not self._repeats(self.recording, arguments):
            self.reason = "its input is not what its operations compute"
            self.recording = None

    @property
    def needs_trial(self) -> bool:
        """Whether later steps may compute something else."""
        return self.recording is not None and bool(self.recording.computed)

    def _source_of(self, argument: Any, ids: Any) -> Source | str:
        recorder = self._recorder
        if recorder is None:
            return self._objects.source_of(argument, ids)
        source = self._objects.source_of(argument, ids, recorder.trace)
        # The step may take another part of a wider batch: x[:, :-1] is one column more. Where there
        # are 20 columns, x[:, :20] is all of them, by another tensor.
        is_part = isinstance(source, ViewSource) and source.form == "narrow"
        is_alias = isinstance(source, PathSource) and not self._objects.has(argument)
        if is_part or is_alias:
            traced = recorder.trace(argument)
            return source if isinstance(traced, str) else traced
        return source

    def _repeats(self, recording: Recording, arguments: tuple[Any, ...]) -> bool:
        """Whether repeating the operations makes the same arguments: no value went past the
        recorder."""
        assert self._recorder is not None
        roots = self._recorder.roots
        try:
            with replaying():
                repeated = recording.get(roots)
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

    objects: of the batch of the first step. trial: of its computed calls, once it is over.
    is_complete: whether the step makes no other calls.
    """

    def __init__(
        self,
        calls: list[PrefetchedCall],
        objects: BatchObjects,
        is_complete: bool,
        trial: Trial | None = None,
    ) -> None:
        self.calls = calls
        self.is_complete = is_complete
        self.placed_paths: set[str] = set()
        """Tables of which some calls are not prefetched: a call is distinguished by how many come
        before it."""
        self.regular: set[str] = set()
        """Tables of which each step makes as many calls."""
        self.computes = trial is not None
        """Whether it makes computed calls."""
        self._sizes: Sizes = {}
        if trial is not None:
            self.placed_paths = set(trial.reasons)
            self.regular = set(trial.calls)
            self._sizes = trial.sizes
        names: set[str] = set()
        paths: list[Path] = []
        for call in calls:
            names.update(call.path.split("."))
            for source in call.arguments:
                paths += source.paths
                if isinstance(source, JaggedSource):
                    names.update(source.keys)
        self.order = FeatureOrder(objects, paths, names)

    def computes_from(self, roots: BatchRoots) -> bool:
        """Whether computed calls can be made of a batch of such sizes."""
        return have_known_sizes(roots, self._sizes)

    def reads_written_tensors(self) -> bool:
        """Whether a call is computed from tensors of the module that are written to between steps,
        or in them."""
        computed = [call for call in self.calls if isinstance(call, ComputedCall)]
        return any(call.reads_written_tensors() for call in computed)


@dataclass(frozen=True)
class ReportedCall:
    """What ranks send each other of a call of the first step."""

    path: str
    text: str
    """Where its arguments come from."""
    reason: str
    needs_trial: bool


def agree_on_calls(
    recorded: list[RecordedCall], ranks: Ranks
) -> tuple[list[PrefetchedCall], dict[str, str], Trial]:
    """Collective. Return what ranks agree on after the first step of a kind.

    The calls that are prefetched from now on, in one order; table -> why it is not prefetched; the
    trial of those of which later steps show whether they are. Of a table that is in no trial all
    calls are prefetched, or none.
    """
    reported = []
    for call in recorded:
        text = "" if call.recording is None else repr(call.recording.call)
        reported.append(ReportedCall(call.path, text, call.reason, call.needs_trial))
    gathered: list[list[ReportedCall]] = ranks.all_gather(reported)
    all_calls = [call for calls in gathered for call in calls]
    tried = {call.path for call in all_calls if call.needs_trial}
    reasons: dict[str, str] = {}
    for path in sorted({call.path for call in all_calls} - tried):
        refusals = [call.reason for call in all_calls if call.path == path and call.reason]
        if refusals:
            reasons[path] = refusals[0]
        elif not all(_calls_of(path, calls) == _calls_of(path, gathered[0]) for calls in gathered):
            reasons[path] = "the ranks call it with different parts of their batches"
    remaining: dict[str, list[PrefetchedCall]] = {}
    for recorded_call in recorded:
        if recorded_call.recording is not None:
            remaining.setdefault(recorded_call.path, []).append(recorded_call.recording.call)
    # Every rank has as many calls of these tables. All list them in rank 0's order, in which ids
    # are exchanged.
    order = [call.path for call in gathered[0]]
    prefetched = [remaining[path].pop(0) for path in order if path not in {*reasons, *tried}]
    return prefetched, reasons, Trial(sorted(tried), order)


def _calls_of(path: str, calls: list[ReportedCall]) -> list[ReportedCall]:
    return [call for call in calls if call.path == path]
