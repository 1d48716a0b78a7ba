"""The first steps of a kind: what they compute is recorded and compared before anything is sent ahead."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lightning_distrec.pipeline.computed.replaying import replaying
from lightning_distrec.pipeline.computed.variants import ComputedCall, Variant
from lightning_distrec.pipeline.provenance.same_input import is_same_input
from lightning_distrec.pipeline.provenance.sources import BatchRoots
from lightning_distrec.ranks import Ranks

TRIAL_STEPS = 3


@dataclass(frozen=True)
class _RankTrial:
    """What one rank has learned: table -> for each of its calls why it is not prefetched, or ""."""

    reasons: dict[str, list[str]]


class Trial:
    """What is known of the computed calls of one kind of step.

    paths: tables whose calls are compared, alike on all ranks.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.calls: dict[str, list[ComputedCall]] = {path: [] for path in paths}
        self.steps = 0
        self._is_irregular: set[str] = set()
        """Tables that are not called equally often in all steps."""
        self._ahead: dict[str, list[tuple[Any, ...] | None]] = {}
        """What was computed ahead of the step that is running."""

    @property
    def is_over(self) -> bool:
        """Whether no more steps are recorded for it."""
        return self.steps >= TRIAL_STEPS

    def begin_step(self, roots: BatchRoots) -> None:
        """Compute the arguments of the step that begins, to compare them with those that it calls with."""
        roots.memo.clear()
        with replaying():
            self._ahead = {path: [_ahead(call, roots) for call in calls] for path, calls in self.calls.items()}
        roots.memo.clear()

    def compare(self, path: str, place: int, arguments: tuple[Any, ...]) -> None:
        """Compare a call that the step makes now with what was computed ahead of it."""
        ahead = self._ahead.get(path, [])[place : place + 1]
        if not ahead or ahead[0] is None:
            return
        if not all(is_same_input(given, found, torch.equal) for given, found in zip(arguments, ahead[0], strict=True)):
            self.calls[path][place].learn("its input is not what its operations compute ahead of the step")

    def end_step(self, recorded: Mapping[str, Sequence[Variant | str]]) -> None:
        """Learn from the recorded calls of a step: table -> its calls in their order."""
        for path, calls in self.calls.items():
            of_path = recorded.get(path, ())
            if self.steps and len(of_path) != len(calls):
                self._is_irregular.add(path)
            if not self.steps:
                calls += [ComputedCall(path, place) for place in range(len(of_path))]
            for call, variant in zip(calls, of_path, strict=False):
                call.learn(variant)
        self.steps += 1

    def agree(self, ranks: Ranks) -> tuple[list[ComputedCall], dict[str, str]]:
        """Collective. Return the calls that all ranks prefetch, and why others are not: table -> reason."""
        own = {path: [call.refused for call in calls] for path, calls in self.calls.items()}
        # Calls can be distinguished by their place only where each step makes as many.
        own |= {path: [IRREGULAR for _ in own[path]] for path in self._is_irregular}
        of_ranks: list[_RankTrial] = ranks.all_gather(_RankTrial(own))
        usable: list[ComputedCall] = []
        reasons: dict[str, str] = {}
        for path, calls in self.calls.items():
            lists = [of_rank.reasons[path] for of_rank in of_ranks]
            if any(len(of_rank) != len(lists[0]) for of_rank in lists):
                lists = [[IRREGULAR] * len(calls)]
            for call, *refused in zip(calls, *lists, strict=True):
                if reason := next(filter(None, refused), ""):
                    reasons.setdefault(path, reason)
                    call.refused = call.refused or reason
                else:
                    usable.append(call)
        return usable, reasons


IRREGULAR = "the steps do not call it equally often"


def _ahead(call: ComputedCall, roots: BatchRoots) -> tuple[Any, ...] | None:
    try:
        return call.get(roots, confirmed=1)
    except Exception:  # not known yet, or the step itself will raise it
        return None
