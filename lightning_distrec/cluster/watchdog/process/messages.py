"""What a rank, the process that watches over it, and rank 0's process send each other: lines of JSON."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

TICK_SECONDS = 0.5
"""How often each process sends its rank's state, and rank 0's its verdict."""
ANSWER_SECONDS = 2.0
"""How long to wait for a verdict when a rank asks why a collective failed, and for the ranks' locations."""
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True)
class Settings:
    """What a rank starts its process with."""

    rank: int
    pid: int
    nodes: list[str]
    """The node of each rank by name; empty where that is not known."""
    host: str
    port: int
    """Port of rank 0's process."""
    listener: int | None
    """File descriptor at which rank 0's process listens; None for the other ranks' processes."""
    token: str
    silence_seconds: float
    """A rank that is stopped or silent for this time is taken for lost."""
    stall_seconds: float
    """If no rank makes progress for this time, a line says where each of them is."""

    def name(self, rank: int) -> str:
        """Return a rank by number and node."""
        return f"rank {rank} on {self.nodes[rank]}" if self.nodes else f"rank {rank}"

    def names(self, ranks: Sequence[int]) -> str:
        """Return one rank by number and node, several by their numbers."""
        if len(ranks) == 1:
            return self.name(ranks[0])
        more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        return f"ranks {', '.join(map(str, ranks[:8]))}{more}"


@dataclass(frozen=True)
class RankState:
    """What a process knows of its rank, and sends to rank 0's process."""

    rank: int
    started: int = 0
    """Number of runs (fit, validate ...) that the rank has started."""
    ended: int = 0
    """The last run that has ended."""
    failed: int = 0
    """The last run that has failed."""
    failure: str = ""
    """Why it failed; empty if only because of another rank."""
    is_gone: bool = False
    is_closed: bool = False
    """The rank is not watched any more, and goes on."""
    is_stopped: bool = False
    is_leaving: bool = False
    """The rank's run has failed, and it gives up its shards and process groups, which may wait for other ranks."""
    killed_for: str = ""
    """The verdict for which the process has killed its rank."""
    questions: int = 0
    """How often the rank has asked why a collective failed."""
    survey: int = 0
    """The last survey that the rank has answered, with its location and progress."""
    location: str = ""
    progress: str = ""

    @property
    def is_running(self) -> bool:
        """Whether the rank is in a run, where it may wait for others."""
        return self.started > max(self.ended, self.failed) and not (self.is_gone or self.is_closed)

    @property
    def lingers(self) -> bool:
        """Whether the rank is leaving, where it may wait for others too."""
        return self.is_leaving and not (self.is_gone or self.is_closed)


@dataclass(frozen=True)
class HubMessage:
    """What rank 0's process sends to all."""

    verdict: str = ""
    """Which rank the others wait for in a collective that cannot complete, and why; empty if there is none."""
    verdict_for_leaving: str = ""
    """The same for ranks that are leaving: which rank is gone that they may wait for."""
    survey: int = 0
    """Number of surveys so far: all ranks answer a new one with their locations."""
    locations: str = ""
    """Where the ranks are."""


def as_line(message: RankState | HubMessage) -> bytes:
    """Return a message as it is sent."""
    return json.dumps(asdict(message)).encode() + b"\n"


def num_ticks(seconds: float) -> int:
    """Return the number of ticks in a time, at least one."""
    return max(1, round(seconds / TICK_SECONDS))
