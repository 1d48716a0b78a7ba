"""From the first step of a kind to the calls that later ones are expected to make, alike on all ranks."""

from dataclasses import dataclass
from typing import Any

from lightning_distrec.pipeline.control_message import Ranks
from lightning_distrec.pipeline.provenance import Call, Leaves, Source


class Recorded:
    """A call of the first step, and where its arguments came from.

    leaves: the objects of the batch before the step.
    """

    def __init__(self, path: str, arguments: tuple[Any, ...], leaves: Leaves) -> None:
        self.path = path
        sources: list[Source] = []
        self.reason = ""
        """Why it cannot be foreseen, if it cannot."""
        for i, argument in enumerate(arguments):
            source = leaves.source_of(argument, arguments[0] if i else None)
            if isinstance(source, str):
                self.reason = self.reason or source
            else:
                sources.append(source)
        self.call = None if self.reason else Call(path, tuple(sources))


@dataclass(frozen=True)
class _OfRank:
    """What one rank has recorded."""

    calls: tuple[tuple[str, str, str], ...]
    """Path, description of the call, reason; in the order of the calls."""

    def of(self, path: str) -> list[tuple[str, str, str]]:
        return [call for call in self.calls if call[0] == path]


def agree_on_calls(recorded: list[Recorded], ranks: Ranks) -> tuple[list[Call], dict[str, str]]:
    """Collective. Return the calls that all ranks foresee alike, in one order, and why others are not: path -> reason.

    A module is foreseen in all of its calls, or in none.
    """
    mine = _OfRank(tuple((call.path, repr(call.call), call.reason) for call in recorded))
    of_ranks: list[Any] = ranks.all_gather(mine)
    reasons: dict[str, str] = {}
    for path in sorted({path for of_rank in of_ranks for path, _, _ in of_rank.calls}):
        lists = [of_rank.of(path) for of_rank in of_ranks]
        refused = [reason for calls in lists for _, _, reason in calls if reason]
        if refused:
            reasons[path] = refused[0]
        elif any(calls != lists[0] for calls in lists):
            reasons[path] = "the ranks call it with different parts of their batches"
    calls: list[Call] = []
    left = {call.path: [other.call for other in recorded if other.path == call.path] for call in recorded}
    for path, _, _ in of_ranks[0].calls:  # rank 0's order
        if path not in reasons:
            call = left[path].pop(0)
            assert call is not None
            calls.append(call)
    return calls, reasons
