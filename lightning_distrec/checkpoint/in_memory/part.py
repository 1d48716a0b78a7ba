"""A part: what the ranks of one node have of a checkpoint, as a folder in memory.

It is a checkpoint of those ranks, whose sharded tensors have the rows of those ranks only, and of what all ranks hold
it has all. So whoever takes their place needs nothing of other nodes.

ranks_<first>-<last>/step_<step>.ckpt   the folder of a checkpoint, see save.py, with two more things:
  complete.json   "part": the ranks that wrote it, and how many there were
  checksums.json  CRC-32 of each file of tensors, written last
"""

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_distrec.atomic_files import replace_file
from lightning_distrec.checkpoint.atomic_folder import read_marker
from lightning_distrec.checkpoint.save import rank_file
from lightning_distrec.errors import CheckpointError

PART = "part"
CHECKSUMS_FILE = "checksums.json"
BLOCK_BYTES = 2**24


@dataclass(frozen=True)
class Part:
    """A complete part."""

    path: str
    ranks: tuple[int, ...]
    """The ranks that wrote it."""
    num_ranks: int
    """How many ranks there were on all nodes."""
    step: int
    job: str
    """The label of the fit."""

    @property
    def is_full(self) -> bool:
        """Whether all ranks wrote it, so that any number of ranks can read it."""
        return len(self.ranks) == self.num_ranks


def path_of(job: Path, ranks: tuple[int, ...], step: int) -> Path:
    """Return where the part of some ranks is in the folder of a job."""
    return job / f"ranks_{ranks[0]}-{ranks[-1]}" / f"step_{step}.ckpt"


def facts_of(ranks: tuple[int, ...], num_ranks: int) -> dict[str, Any]:
    """Return what the marker says of a part."""
    return {PART: {"ranks": list(ranks), "of": num_ranks}}


def parts_in(job: Path) -> list[Part]:
    """Return the complete parts in the folder of a job."""
    found = []
    for path in sorted(job.glob("ranks_*/step_*.ckpt")):
        try:
            marker = read_marker(path)
            part = marker[PART]
            if (path / CHECKSUMS_FILE).is_file():
                step, label = int(marker["global_step"]), str(marker["job"])
                found.append(Part(str(path), tuple(map(int, part["ranks"])), int(part["of"]), step, label))
        except (CheckpointError, KeyError, TypeError, ValueError):
            continue
    return found


def files_of(local_rank: int) -> tuple[str, str]:
    """Return the names of the files that a rank writes into its node's part."""
    return f"__{local_rank}_0.distcp", rank_file(local_rank)


def checksums_of(path: Path, local_rank: int) -> dict[str, int]:
    """Return the checksums of a rank's files."""
    return {name: _checksum(path / name) for name in files_of(local_rank) if (path / name).exists()}


def write_checksums(path: Path, of_ranks: list[dict[str, int]]) -> None:
    """Write the checksums of all files, which makes the part complete."""
    replace_file(path / CHECKSUMS_FILE, json.dumps({k: v for each in of_ranks for k, v in each.items()}).encode())


def check(path: Path, local_rank: int) -> str:
    """Return what is wrong with the bytes of a rank's files; "" for nothing."""
    try:
        noted = json.loads((path / CHECKSUMS_FILE).read_text())
        changed = [name for name in files_of(local_rank) if name in noted and _checksum(path / name) != noted[name]]
    except (OSError, ValueError, TypeError) as error:
        return f"{path} cannot be read: {error}"
    return f"{path} is damaged: the bytes of {', '.join(changed)} have changed" if changed else ""


def _checksum(path: Path) -> int:
    value = 0
    with open(path, "rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            value = zlib.crc32(block, value)
    return value
