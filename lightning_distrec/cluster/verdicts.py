"""What ranks report of themselves, and what follows from it: which rank holds the others up."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

# What a user may not know whose ranks have parted ways.
RULE = (
    "All ranks must make the same calls: lookups of sharded tables, all_gather and "
    "self.log(sync_dist=True) must not be under a condition that differs between ranks, such as "
    "trainer.is_global_zero."
)

MAX_NAMED = 8
"""Ranks at one place that are named."""


@dataclass(frozen=True)
class RankState:
    """What a rank reports. Runs (fit, validate ...) are numbered from 1."""

    rank: int
    job: str = ""
    """The job's name: another one's rank may connect by mistake."""
    started: int = 0
    """The last run that has started; `ended` and `failed`: the last that has."""
    ended: int = 0
    failed: int = 0
    failure: str = ""
    """Why it failed; empty if only because of another rank."""
    is_gone: bool = False
    """Whether its connection is closed, as the kernel does at the end of a process."""
    is_silent: bool = False
    is_closed: bool = False
    """It is not watched any more, and goes on."""
    is_leaving: bool = False
    """Its run has failed, and it gives up its shards and process groups, which may wait for other
    ranks."""
    is_asking: bool = False
    """A collective of it has failed, and it waits for the reason."""
    is_stuck: bool = False
    """It has waited in one exchange, at one place, for `deadlock_seconds`."""
    location: str = field(default="", compare=False)
    """Where it is, and how far its run; these change all the time, and are not compared."""
    progress: str = field(default="", compare=False)

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of the rank."""
        return self.is_gone or self.is_closed

    @property
    def last(self) -> int:
        """The last run that is over, well or not."""
        return max(self.ended, self.failed)

    @property
    def is_running(self) -> bool:
        """Whether the rank is in a run, where it may wait for others."""
        return self.started > self.last and not self.is_over

    @property
    def lingers(self) -> bool:
        """Whether the rank is leaving, where it may wait for others too."""
        return self.is_leaving and not self.is_over


@dataclass(frozen=True)
class Verdict:
    """What follows from the states of the ranks."""

    rank_0: RankState
    running: str = ""
    """Which rank those that run wait for without end, and why; empty if there is none."""
    leaving: str = ""
    """Which rank is gone that those that are leaving may wait for."""
    locations: str = field(default="", compare=False)
    """Where the ranks are, if one of them is asking."""


@dataclass(frozen=True)
class Judge:
    """Says which rank holds the others up, by what they report."""

    nodes: Sequence[str]
    """The node of each rank by name, "" where that is not known."""
    silence_seconds: float
    """A rank that is silent for this time is taken for lost."""
    deadlock_seconds: float
    """Ranks that wait in different exchanges for this time are ended; 0 disables."""

    def judge(self, states: Sequence[RankState], earlier: Verdict) -> Verdict:
        """Return what follows from the states of ranks, which begin with rank 0's.

        The reason of the verdict before stays while there is any: ranks that end for it look like
        ranks that have died.
        """
        running = [state for state in states if state.is_running]
        leaving = [state for state in states if state.lingers]
        reason = next(self._reasons(states, running), "")
        reason_to_leave = next(self._reasons(states, leaving), "")
        is_asked = any(state.is_asking for state in states)
        return Verdict(
            rank_0=states[0],
            running=reason and (earlier.running or reason),
            leaving=reason_to_leave and (earlier.running or earlier.leaving or reason_to_leave),
            locations=self._list_locations(states) if is_asked else "",
        )

    def _reasons(self, states: Iterable[RankState], waiting: list[RankState]) -> Iterator[str]:
        """Yield which rank blocks those that may wait, and why; the cause before what followed.

        waiting: ranks that are running, or that are leaving: those wait for ranks that are gone,
        and not for such as have failed and are leaving too.
        """
        watched = [state for state in states if not state.is_closed]
        # Before failures, which follow from ranks that cannot report.
        for state in watched:
            # Most are neither: only for those that are is it worth it to look at all others.
            if not (state.is_gone or state.is_silent):
                continue
            # A rank that has ended the run may go: only one that others wait for in a run blocks.
            runs = [other.started for other in waiting if other is not state]
            if max(runs, default=0) <= state.last:
                continue
            if state.is_gone:
                name = self._name(state.rank)
                yield f"{name} has died: its process is gone (killed, or out of memory?)"
            else:
                yield self._describe_silence(state.rank)
        # Ranks that have failed in a run that others are still in, or in which they have died.
        runs_of_dead = {other.started for other in waiting}
        runs_of_all = {other.started for other in waiting if other.is_running}
        missed = []
        for state in watched:
            if state.failed in (runs_of_dead if state.is_gone else runs_of_all):
                missed.append(state)
        for state in missed:
            if state.failure:
                yield f"{self._name(state.rank)} failed: {state.failure}"
        for state in missed:
            if state.is_gone:
                name = self._name(state.rank)
                yield f"{name} has ended after a failed collective: its own output says more"
        # Not one that merely takes long: it computes, or waits for a disk, and the others wait for
        # it in one exchange.
        exchanges = {state.progress for state in waiting}
        if len(exchanges) > 1 and all(state.is_stuck for state in waiting):
            limit = f"{self.deadlock_seconds:g} s"
            locations = self._list_locations(states)
            yield f"ranks wait in different exchanges for {limit}: {locations}. {RULE}"

    def _describe_silence(self, rank: int) -> str:
        return (
            f"{self._name(rank)} has been silent for {self.silence_seconds:g} s: it is "
            "stopped, or in one call that holds the interpreter's lock, or its machine or the "
            "network to it is down"
        )

    def _list_locations(self, states: Iterable[RankState]) -> str:
        """Return where the ranks are, grouped by location."""
        ranks_at: dict[str, list[int]] = {}
        for state in states:
            if state.is_gone:
                location = "its process is gone, or the connection to it"
            elif state.ended == state.started:
                location = "has ended its run"
            else:
                location = f"{state.progress}, {state.location}"
            ranks_at.setdefault(location, []).append(state.rank)
        places = []
        for place, ranks in ranks_at.items():
            more = " and more" if len(ranks) > MAX_NAMED else ""
            numbers = ", ".join(map(str, ranks[:MAX_NAMED]))
            name = f"ranks {numbers}{more}" if len(ranks) > 1 else self._name(ranks[0])
            places.append(f"{name}: {place}")
        return "; ".join(places)

    def _name(self, rank: int) -> str:
        """Return a rank by number and node."""
        node = self.nodes[rank]
        return f"rank {rank} on {node}" if node else f"rank {rank}"
