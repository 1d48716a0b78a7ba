"""What docs/performance.md measured of checkpoints: the points from which docs/scale.md
extrapolates."""

import re
from dataclasses import dataclass

from tests.benchmarks.checkpointing_text import section_of


@dataclass(frozen=True)
class Checkpoints:
    """A save that was measured."""

    num_ranks: int
    seconds: float
    bytes_per_second: float
    """Of all ranks together, on one disk."""
    stall_bytes_per_second: float
    """The same of an asynchronous save: until training goes on."""

    @property
    def bytes_per_second_of_rank(self) -> float:
        """What one rank wrote."""
        return self.bytes_per_second / self.num_ranks

    @property
    def num_bytes(self) -> float:
        """What was saved."""
        return self.seconds * self.bytes_per_second

    @property
    def size_in_words(self) -> str:
        """What was saved, for a legend."""
        return f"{self.num_bytes / 2**30:.1f} GiB"


def read_checkpoints(page: str) -> Checkpoints:
    """Return what the page says. Raises ValueError: it has no section about checkpoints, or another
    one."""
    section = section_of(page) or ""
    save = re.search(r"^\| save \| ([\d.]+) \|.*\| (\d+) \|$", section, re.MULTILINE)
    stall = re.search(r"^\| async save: stall \|.*\| (\d+) \|$", section, re.MULTILINE)
    ranks = re.search(r"saved by (\d+) ranks", section)
    if save is None or stall is None or ranks is None:
        raise ValueError(
            "the page has no measured save: run python -m "
            "tests.benchmarks.checkpointing --write first."
        )
    return Checkpoints(int(ranks[1]), float(save[1]), float(save[2]) * 1e6, float(stall[1]) * 1e6)
