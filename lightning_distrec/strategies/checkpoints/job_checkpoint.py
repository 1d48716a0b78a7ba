"""The checkpoint of a job that was asked to leave, from which it goes on when it runs again, and no other job does."""

import itertools
import sys
import zlib
from pathlib import Path

from lightning_distrec.checkpoint.atomic_folder import is_checkpoint, remove
from lightning_distrec.cluster.consensus import Consensus

_fits = itertools.count(1)


def next_fit() -> int:
    """Return 1 for the first fit of this process, and so on, whichever trainer's it is."""
    return next(_fits)


class JobCheckpoint:
    """Where it lies, and whether there is one.

    root: the trainer's default_root_dir. job: what a job keeps over restarts and shares with no other; "" for none.
    fit: which fit of the process it is, see `next_fit`. A job may run several programs: their arguments are part of the
    name.
    """

    def __init__(self, root: str, job: str, fit: int = 0) -> None:
        program = zlib.crc32("\0".join(sys.argv).encode())
        self.path = Path(root).absolute() / f"{job or 'stopped'}-{program:08x}-fit{fit}.ckpt"
        self._is_of_a_job = bool(job)

    def found(self, ranks: Consensus) -> str | None:
        """Collective. Return the path where rank 0 sees a complete checkpoint; None: not there, or no job."""
        is_there = self._is_of_a_job and ranks.rank == 0 and is_checkpoint(self.path)
        return str(self.path) if ranks.all_gather(is_there)[0] else None

    def remove(self) -> None:
        """Remove the checkpoint of a run that has come to its end. On one rank."""
        if self._is_of_a_job:
            remove(self.path)
