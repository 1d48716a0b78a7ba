"""From the calls of the first step of a kind to the calls that are prefetched in later ones, alike on all ranks."""

from dataclasses import dataclass
from typing import Any

from lightning_distrec.pipeline.feature_order import FeatureOrder
from lightning_distrec.pipeline.provenance import BatchObjects
from lightning_distrec.pipeline.sources import JaggedSource, LookupCall, Source, paths_of
from lightning_distrec.ranks import Ranks


class RecordedCall:
    """A call of the first step, and where its arguments came from.

    objects: those of the batch before the step.
    """

    def __init__(self, path: str, arguments: tuple[Any, ...], objects: BatchObjects) -> None:
        self.path = path
        sources: list[Source] = []
        self.reason = ""
        """Why it cannot be prefetched; "" if it can."""
        for i, argument in enumerate(arguments):
            source = objects.source_of(argument, arguments[0] if i else None)
            if isinstance(source, str):
                self.reason = self.reason or source
            else:
                sources.append(source)
        self.call = None if self.reason else LookupCall(path, tuple(sources))


class StepCalls:
    """The calls of one kind of step that are prefetched, alike on all ranks.

    objects: of the batch of the first step.
    """

    def __init__(self, calls: list[LookupCall], objects: BatchObjects) -> None:
        self.calls = calls
        sources = [source for call in calls for source in call.arguments]
        names = {name for call in calls for name in call.path.split(".")}
        names |= {key for source in sources if isinstance(source, JaggedSource) for key in source.keys}
        self.order = FeatureOrder(objects, [path for source in sources for path in paths_of(source)], names)


@dataclass(frozen=True)
class _RankCalls:
    """What one rank has recorded."""

    calls: tuple[tuple[str, str, str], ...]
    """Path, description of the call, reason; in the order of the calls."""

    def of(self, path: str) -> list[tuple[str, str, str]]:
        return [call for call in self.calls if call[0] == path]


def agree_on_calls(recorded: list[RecordedCall], ranks: Ranks) -> tuple[list[LookupCall], dict[str, str]]:
    """Collective. Return the calls that all ranks prefetch, in one order, and why others are not: path -> reason.

    A module is prefetched in all of its calls, or in none.
    """
    own = _RankCalls(tuple((call.path, repr(call.call), call.reason) for call in recorded))
    of_ranks: list[_RankCalls] = ranks.all_gather(own)
    reasons: dict[str, str] = {}
    for path in sorted({path for of_rank in of_ranks for path, _, _ in of_rank.calls}):
        lists = [of_rank.of(path) for of_rank in of_ranks]
        refused = [reason for calls in lists for _, _, reason in calls if reason]
        if refused:
            reasons[path] = refused[0]
        elif any(calls != lists[0] for calls in lists):
            reasons[path] = "the ranks call it with different parts of their batches"
    left: dict[str, list[LookupCall]] = {}
    for call in recorded:
        if call.call is not None:
            left.setdefault(call.path, []).append(call.call)
    # Every rank has as many calls of these paths, in rank 0's order.
    return [left[path].pop(0) for path, _, _ in of_ranks[0].calls if path not in reasons], reasons
