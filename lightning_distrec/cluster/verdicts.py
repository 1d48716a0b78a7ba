"""What ranks report of themselves, and what follows from it: which rank holds the others up."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

# What a user may not know whose ranks have parted ways.
RULE = (
    "All ranks must make the same calls: lookups of sharded tables, all_gather and "
    "self.log(sync_dist=True) must not be under a condition that differs between ranks, such as "
    "trainer.is_global_zero."
)


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
    def is_running(self) -> bool:
        """Whether the rank is in a run, where it may wait for others."""
        return self.started > max(self.ended, self.failed) and not self.is_over

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
    """The node of each rank by name; empty where that is not known."""
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
            # A rank that has ended the run may go: only one that others wait for in a run blocks.
            last = max(state.ended, state.failed)
            if not any(other.started > last for other in waiting if other is not state):
                continue
            if state.is_gone:
                name = self._name_ranks(state.rank)
                yield f"{name} has died: its process is gone (killed, or out of memory?)"
            elif state.is_silent:
                yield self._describe_silence(state.rank)
        missed = [state for state in watched if self._is_missed(state, waiting)]
        for state in missed:
            if state.failure:
                yield f"{self._name_ranks(state.rank)} failed: {state.failure}"
        for state in missed:
            if state.is_gone:
                name = self._name_ranks(state.rank)
                yield f"{name} has ended after a failed collective: its own output says more"
        # Not one that merely takes long: it computes, or waits for a disk, and the others wait for
        # it in one exchange.
        num_exchanges = len({state.progress for state in waiting})
        if num_exchanges > 1 and all(state.is_stuck for state in waiting):
            limit, locations = f"{self.deadlock_seconds:g} s", self._list_locations(states)
            yield f"ranks wait in different exchanges for {limit}: {locations}. {RULE}"

    def _is_missed(self, state: RankState, waiting: list[RankState]) -> bool:
        """Whether a rank has failed in a run that others are still in, or in which it has died."""
        in_run = [other for other in waiting if other.started == state.failed]
        return any(other.is_running or state.is_gone for other in in_run)

    def _describe_silence(self, rank: int) -> str:
        return (
            f"{self._name_ranks(rank)} has been silent for {self.silence_seconds:g} s: it is "
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
        places = [f"{self._name_ranks(*ranks)}: {place}" for place, ranks in ranks_at.items()]
        return "; ".join(places)

    def _name_ranks(self, *ranks: int) -> str:
        """Return one rank by number and node, several by their numbers."""
        if len(ranks) > 1:
            more = " and more" if len(ranks) > 8 else ""
            return f"ranks {', '.join(map(str, ranks[:8]))}{more}"
        return f"rank {ranks[0]}" + (f" on {self.nodes[ranks[0]]}" if self.nodes else "")
