"""What the section about checkpoints measures, part by part, each in processes of its own."""

import importlib.util
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.benchmarks.checkpointing_loads import CUTS, Loads, export_peaks, loads
from tests.benchmarks.checkpointing_saves import AsyncSaves, Job, Saves, async_saves, saves
from tests.benchmarks.checkpointing_turns import file_system
from tests.support.ranks import run_on_ranks

NUM_RANKS = 2
EXPORT = "lightning_distrec.checkpoint.tools.export_checkpoint"


@dataclass
class Measured:
    """What the parts found."""

    num_rows: int
    file_system: str = ""
    saves: Saves | None = None
    async_saves: AsyncSaves | None = None
    loads: dict[int, Loads] = field(default_factory=dict)
    """Number of ranks -> what was measured there."""
    exports: dict[str, int] = field(default_factory=dict)
    """Suffix -> bytes by which the process grew."""
    missing: dict[str, str] = field(default_factory=dict)
    """Part -> why it could not be measured here."""
    problems: list[str] = field(default_factory=list)
    """What should not have happened."""

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Go on where a part of the measurement fails."""
        try:
            yield
        except (AssertionError, RuntimeError) as error:
            self.problems.append(f"{name}: {error}")


def measure(num_rows: int, rounds: int, place: str | None, tell: Callable[[str], None]) -> Measured:
    """Return what a run finds.

    where: the folder for temporary folders; None for the system's. tell: called with what was found so far.
    """
    measured = Measured(num_rows)
    limit = 300.0 + rounds * 120.0  # of a machine that does other things, too
    with tempfile.TemporaryDirectory(prefix="checkpointing-", dir=place) as folder:
        job = Job(Path(folder), num_rows, rounds)
        measured.file_system = file_system(job.folder)
        with measured.part("async"):
            measured.async_saves = run_on_ranks(async_saves, NUM_RANKS, job, timeout_seconds=limit)[0]
            tell(f"async: {measured.async_saves}")
        with measured.part("save"):
            measured.saves = run_on_ranks(saves, NUM_RANKS, job, timeout_seconds=limit)[0]
            tell(f"save: {measured.saves}")
        for num_ranks in CUTS if measured.saves is not None else ():
            with measured.part(f"load on {num_ranks}"):
                actual = run_on_ranks(loads, num_ranks, job, measured.saves.seed, timeout_seconds=limit)
                measured.loads[num_ranks] = actual[0]
                tell(f"load on {num_ranks}: {actual[0]}")
        if importlib.util.find_spec(EXPORT) is None:
            measured.missing["export"] = "there is none yet"
        elif measured.saves is not None:
            with measured.part("export"):
                measured.exports = run_on_ranks(export_peaks, 1, job, timeout_seconds=limit)[0]
                tell(f"export: {measured.exports}")
    return measured
