"""A part: what the ranks of one node have of a checkpoint, as a folder in memory.

It is a checkpoint of those ranks, whose sharded tensors have the rows of those ranks only, and of what all ranks hold
it has all. So whoever takes their place needs nothing of other nodes.

ranks_<first>-<last>/step_<step>.ckpt   the folder of a checkpoint, see save.py, or of a difference to the one before.
  complete.json   "part": the ranks that wrote it, how many there were, and the parts that a difference lies over
"""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_distrec.checkpoint.atomic_folder import is_checkpoint, read_marker
from lightning_distrec.checkpoint.save import rank_file
from lightning_distrec.checkpoint.storage import StoredTensors, matches_checksums
from lightning_distrec.errors import CheckpointError

PART = "part"


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
    over: tuple[str, ...] = ()
    """Names of the parts that it is a difference to, each over the one before it, the first one full."""

    @property
    def paths(self) -> list[str]:
        """What has to be read: those that it lies over, and itself."""
        return [*(str(Path(self.path).with_name(name)) for name in self.over), self.path]

    @property
    def is_full(self) -> bool:
        """Whether all ranks wrote it, so that any number of ranks can read it."""
        return len(self.ranks) == self.num_ranks


def path_of(job: Path, ranks: tuple[int, ...], step: int) -> Path:
    """Return where the part of some ranks is in the folder of a job."""
    return job / f"ranks_{ranks[0]}-{ranks[-1]}" / f"step_{step}.ckpt"


def facts_of(ranks: tuple[int, ...], num_ranks: int, over: list[str]) -> dict[str, Any]:
    """Return what the marker says of a part."""
    return {PART: {"ranks": list(ranks), "of": num_ranks, "over": over}}


def parts_in(job: Path) -> list[Part]:
    """Return the complete parts in the folder of a job."""
    found = []
    for path in sorted(job.glob("ranks_*/step_*.ckpt")):
        try:
            marker = read_marker(path)
            part = marker[PART]
            step, label, over = int(marker["global_step"]), str(marker["job"]), tuple(map(str, part["over"]))
            if all(is_checkpoint(path.with_name(name)) for name in over):
                found.append(Part(str(path), tuple(map(int, part["ranks"])), int(part["of"]), step, label, over))
        except (CheckpointError, KeyError, TypeError, ValueError):
            continue
    return found


def files_of(local_rank: int) -> tuple[str, str]:
    """Return the names of the files that a rank writes into its node's part."""
    return f"__{local_rank}_0.distcp", rank_file(local_rank)


def check(path: Path, local_rank: int) -> str:
    """Return what is wrong with the bytes of a rank's files; "" for nothing. torch.save has put checksums into them."""
    tensors, rest = files_of(local_rank)
    try:
        records = StoredTensors(path, is_part=True).records(only_file=tensors)
        changed = {tensors for _, record in records if not matches_checksums(record)}
        if (path / rest).exists() and zipfile.ZipFile(path / rest).testzip() is not None:
            changed.add(rest)
    except zipfile.BadZipFile:
        changed = {rest}
    except (OSError, CheckpointError) as error:
        return f"{path} cannot be read: {error}"
    return f"{path} is damaged: the bytes of {', '.join(sorted(changed))} have changed" if changed else ""
