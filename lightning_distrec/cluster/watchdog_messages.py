"""What a rank's watchdog starts with, and what the processes of the watchdog send each other: flat
lines of JSON."""

from dataclasses import asdict, dataclass, field, fields

from lightning_distrec.cluster.door import encode_fields, parse_fields

# What a user may not know whose ranks have parted ways.
RULE = (
    "All ranks must make the same calls: lookups of sharded tables, all_gather and "
    "self.log(sync_dist=True) must not "
    "be under a condition that differs between ranks, such as trainer.is_global_zero."
)


@dataclass(frozen=True)
class Settings:
    """What a rank starts its process with."""

    rank: int
    pid: int
    nodes: list[str]
    """The node of each rank by name; empty where that is not known."""
    host: str
    """Address of the hub, and its port."""
    port: int
    listener: int | None
    """File descriptor at which the hub listens; None for the other ranks' processes."""
    token: str
    """Known to the ranks of this job only."""
    silence_seconds: float
    """A rank that is stopped or silent for this time is taken for lost."""
    deadlock_seconds: float
    """Ranks that wait in different exchanges for this time are ended; 0 disables."""

    def name_ranks(self, *ranks: int) -> str:
        """Return one rank by number and node, several by their numbers."""
        if len(ranks) > 1:
            return f"ranks {', '.join(map(str, ranks[:8]))}" + (
                " and more" if len(ranks) > 8 else ""
            )
        return f"rank {ranks[0]}" + (f" on {self.nodes[ranks[0]]}" if self.nodes else "")

    def describe_silence(self, rank: int) -> str:
        """Return the verdict on a rank that reports nothing."""
        silence = f"{self.silence_seconds:g} s"
        return (
            f"{self.name_ranks(rank)} has been silent for {silence}: its machine or the "
            "network to it is down"
        )


@dataclass(frozen=True)
class RankState:
    """What a process knows of its rank, and sends to the hub. Runs (fit, validate ...) are numbered
    from 1."""

    rank: int
    started: int = 0
    """The last run that has started; `ended` and `failed`: the last that has."""
    ended: int = 0
    failed: int = 0
    failure: str = ""
    """Why it failed; empty if only because of another rank."""
    is_gone: bool = False
    is_closed: bool = False
    """It is not watched any more, and goes on."""
    is_stopped: bool = False
    is_leaving: bool = False
    """Its run has failed, and it gives up its shards and process groups, which may wait for other
    ranks."""
    is_writing: bool = False
    """A thread of it writes a checkpoint."""
    is_asking: bool = False
    """A collective of it has failed, and it waits for the reason."""
    killed_for: str = ""
    """The verdict for which the process has killed its rank."""
    is_stuck: bool = False
    """It has waited in one exchange, at one place, for `deadlock_seconds`."""
    is_waiting: bool = field(default=False, compare=False)
    """Whether it was in an exchange when a rank last asked, and at which place: equal while nothing
    changes there."""
    place: int = field(default=0, compare=False)
    location: str = field(default="", compare=False)
    """Where it was, and how far its run, when a rank last asked. These may wait for a tick, and are
    not compared."""
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
class HubMessage:
    """What the hub sends to all."""

    verdict: str = ""
    """Which rank those that run wait for without end, and why; empty if there is none."""
    verdict_for_leaving: str = ""
    """Which rank is gone that those that are leaving may wait for."""
    locations: str = ""
    """Where the ranks are, if one of them is asking."""


def encode_line(message: RankState | HubMessage) -> bytes:
    """Return a message as it is sent."""
    return encode_fields(asdict(message))


def parse_state(line: bytes) -> RankState:
    """Return what a process sends of its rank. Raises ValueError: it is something else."""
    values = parse_fields(line)
    if {name: type(value) for name, value in values.items()} != {
        item.name: item.type for item in fields(RankState)
    }:
        raise ValueError("not the state of a rank")
    return RankState(**values)
