"""What the page about performance measures, part by part, each in processes of its own."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.benchmarks.performance_contenders import Turn, missing_option
from tests.benchmarks.performance_link import OnLink, on_limited_link
from tests.benchmarks.performance_memory import Held, held
from tests.benchmarks.performance_model import table_bytes
from tests.benchmarks.performance_rounds import CannotMeasure, Job, Times, difference, take_turns
from tests.support.ranks import run_on_ranks

NUM_RANKS = 2
BARE = ("by hand", "by hand, prefetched", "ours", "ours, prefetched")
LOGGED = ("ours, logged", "ours, prefetched, logged")
QUANTIZED = "ours, prefetched, quantized"
DELAY_MILLISECONDS = 4.0
LINKS = (1000, 200)
"""Mbit/s."""
ROWS, MANY_ROWS = 100_000, 1_000_000
COPIES_OF_DDP = 3
"""What DDP holds of every table on each rank: its rows, their gradient, and the bucket that
travels."""
SPARE_BYTES = 4 * 2**30
LOSS_LIMIT = 1e-6


@dataclass
class Measured:
    """What the parts found."""

    local: Times = field(default_factory=dict)
    delayed: Times = field(default_factory=dict)
    links: dict[int, OnLink] = field(default_factory=dict)
    """Mbit/s -> what was measured there."""
    against_ddp: dict[int, Times] = field(default_factory=dict)
    """Rows of each table -> times."""
    memory: dict[int, list[Held]] = field(default_factory=dict)
    """Rows of each table -> what each rank held."""
    missing: dict[str, str] = field(default_factory=dict)
    """Part -> why it could not be measured here."""
    problems: list[str] = field(default_factory=list)
    """What should not have happened."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Go on where a part of the measurement fails."""
        try:
            yield
        except CannotMeasure as error:
            self.missing[name] = str(error)
        except (AssertionError, RuntimeError) as error:
            self.problems.append(f"{name}: {error}")


def measure(
    parts: Iterable[str],
    rounds: int,
    many_rows: bool,
    tell: Callable[[str], None],
    profiles: str = "",
) -> Measured:
    """Return what these parts, of PARTS, find.

    many_rows: whether there are runs with large tables, too.
    tell: called with what was found so far.
    profiles: folder for profiles of the steps here; "" for none.
    """
    measured, parts = Measured(), set(parts)
    for option in sorted({missing_option(name) for name in (*BARE, *LOGGED, QUANTIZED)} - {""}):
        measured.missing[option] = "the strategy has no such option"
    if parts & {"bare", "logged"}:
        with measured.part("steps"):
            names = [*BARE, *LOGGED] if "logged" in parts else BARE
            measured.local = _on_this_machine(Job(_present(names), rounds, profiles=profiles))
            _finish(measured, "steps", measured.local, tell)
    if "delay" in parts:
        with measured.part("delay"):
            job = Job(_present(BARE), rounds, delay_milliseconds=DELAY_MILLISECONDS)
            measured.delayed = _on_this_machine(job)
            _finish(measured, "delay", measured.delayed, tell)
    for rate in LINKS if "link" in parts else ():
        with measured.part(f"link of {rate} Mbit/s"):
            job = Job(_present([*BARE, QUANTIZED]), rounds)
            measured.links[rate] = link = on_limited_link(job, rate, _timeout_seconds(job))
            tell(
                f"link of {rate} Mbit/s: {link.one_way:.0f} Mbit/s one way, {link.both_ways:.0f} "
                "both ways"
            )
            _finish(measured, f"link of {rate} Mbit/s", link.times, tell)
    if "ddp" in parts:
        with measured.part(f"DDP, {ROWS} rows"):
            job = Job((best_of_ours(), "DDP"), rounds, turns=(("DDP", Turn(3, 5, 1)),))
            measured.against_ddp[ROWS] = _on_this_machine(job)
            _finish(measured, f"DDP, {ROWS} rows", measured.against_ddp[ROWS], tell)
    if "ddp" in parts and many_rows:
        with measured.part(f"DDP, {MANY_ROWS} rows"):
            measured.against_ddp[MANY_ROWS] = _against_ddp_with_many_rows(rounds)
            _finish(measured, f"DDP, {MANY_ROWS} rows", measured.against_ddp[MANY_ROWS], tell)
    if "memory" in parts:
        with measured.part("memory"):
            num_rows = MANY_ROWS if many_rows else ROWS
            measured.memory[num_rows] = run_on_ranks(held, NUM_RANKS, num_rows, timeout_seconds=300)
            tell(f"memory: {measured.memory[num_rows]}")
    return measured


def best_of_ours() -> str:
    """Return the contender that stands for us where there is one only."""
    return "ours" if missing_option("ours, prefetched") else "ours, prefetched"


def _present(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(name for name in names if not missing_option(name))


def _timeout_seconds(job: Job) -> float:
    return 120.0 + job.rounds * len(job.contenders) * 30.0


def _on_this_machine(job: Job) -> Times:
    return run_on_ranks(take_turns, NUM_RANKS, job, timeout_seconds=_timeout_seconds(job))[0]


def _against_ddp_with_many_rows(rounds: int) -> Times:
    """One after the other: DDP leaves no memory for anything else."""
    needed = NUM_RANKS * COPIES_OF_DDP * table_bytes(MANY_ROWS) + SPARE_BYTES
    if (free := _available_bytes()) < needed:
        raise CannotMeasure(
            f"DDP needs {needed / 2**30:.0f} GiB, of which {free / 2**30:.0f} are free"
        )
    distrec = Job((best_of_ours(),), rounds, num_rows=MANY_ROWS)
    ddp = Job(("DDP",), 1, num_rows=MANY_ROWS, turn=Turn(1, 3, 1))
    return _on_this_machine(distrec) | _on_this_machine(ddp)


def _available_bytes() -> int:
    with open("/proc/meminfo") as file:
        return next(
            int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")
        )


def _finish(measured: Measured, part: str, times: Times, tell: Callable[[str], None]) -> None:
    """Tell what was timed, and keep what is wrong about it: one model, the same batches, so the
    same losses."""
    for name, timed in times.items():
        tell(f"{part}: {name}: {timed.milliseconds:.2f} ms a step, {timed.exchanges:.1f} exchanges")
        for text in sorted(timed.messages):
            tell(f"{part}: {name} warned: {text}")
    exact = [name for name in times if name.startswith("ours") and name != QUANTIZED]
    pairs = [("ours", name, 0.0) for name in exact if "ours" in times]
    pairs += [
        ("by hand", name, LOSS_LIMIT) for name in (*exact, "by hand, prefetched") if name in times
    ]
    for first, other, limit in pairs if "by hand" in times else ():
        if not (actual := difference(times, first, other)) <= limit:
            measured.problems.append(
                f"{part}: losses of '{first}' and '{other}' differ by {actual:.1e}"
            )
