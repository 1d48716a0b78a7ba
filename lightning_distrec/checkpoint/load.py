"""The forms that a checkpoint on disk may have: a file of ours, torch, Lightning or safetensors, or
our folder."""

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_distrec.checkpoint.atomic_folder import CHECKSUMS, MARKER
from lightning_distrec.checkpoint.checksums import (
    BLOCK_BYTES,
    SummedFile,
    changed_files,
    damaged_records,
    opened_archive,
)
from lightning_distrec.checkpoint.hyperparameters import EXTRA
from lightning_distrec.checkpoint.plain_state import (
    CHUNKED,
    STORED,
    from_bytes,
    insert_tensors,
    read_plain,
)
from lightning_distrec.checkpoint.save import STATE_FILE, rank_file
from lightning_distrec.checkpoint.single_file import split_extra
from lightning_distrec.checkpoint.tensor_files import SUFFIX, StoredTensors, read_safetensors
from lightning_distrec.errors import CheckpointError
from lightning_distrec.ranks import Ranks

PICKLE = "/data.pkl"
"""End of the name of the record that has all but tensors."""


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint holds."""

    checkpoint: dict[str, Any]
    """As it was saved; of sharded tensors there is a `LazyTensor` to read from."""
    rank_state: dict[str, Any] | None
    """What this rank alone had saved; None on another number of ranks, and for files of other
    programs."""
    rank_0_state: dict[str, Any] | None
    """What rank 0 alone had saved; None for files of other programs."""
    marker: dict[str, Any] | None
    """The content of a folder's marker, or a file's `EXTRA`; None for files of other programs."""


@dataclass(frozen=True)
class Origin:
    """Which run a checkpoint is of, and how far that was."""

    job: str
    """The label that it was saved with; "" where a run cannot resume from it by itself."""
    step: int
    written: float
    """When it was complete, by the clock of the file system."""


class CheckpointFile:
    """One file. read: returns its content, given `pickles`; None: from the path, by its suffix."""

    def __init__(self, path: Path, read: Callable[[bool], object] | None = None) -> None:
        self._path = path
        self._is_local = read is None
        self._read = read or partial(_read_file, path)

    def load(self, rank: int, num_ranks: int, pickles: bool = False) -> Loaded:
        """Read it; the tensors of torch's files are mapped into memory, those of safetensors are
        handles."""
        path = self._path
        checkpoint, extra = split_extra(path, self._content(pickles))
        if extra is None:
            return Loaded(checkpoint, None, None, None)
        try:
            # Each is kept as bytes, so that a rank unpickles only its own and rank 0's.
            states: list[bytes] = extra["rank_states"]
            is_same_number = len(states) == num_ranks
            rank_0_state = from_bytes(states[0], f"the state of rank 0 in {path}")
            rank_state = (
                from_bytes(states[rank], f"the state of rank {rank} in {path}")
                if is_same_number
                else None
            )
        except (KeyError, IndexError, TypeError) as error:
            raise CheckpointError(
                f"{path} is damaged: it lacks the states of its ranks ({error!r})."
            ) from error
        return Loaded(checkpoint, rank_state, rank_0_state, extra)

    def contents(self, pickles: bool = False) -> Loaded:
        """Read it, as one rank would."""
        return self.load(0, 1, pickles)

    def origin(self, pickles: bool = False) -> Origin:
        """Read where it comes from. Raises CheckpointError where that is damaged; tensors are not
        looked at."""
        with opened_archive(self._path) as archive:
            if archive is not None:
                _read_pickles(archive)
        content = self._content(pickles)
        return _origin(self._path, self._path, content.get(EXTRA), content)

    def find_damage(self, ranks: Ranks | None = None) -> list[str] | None:
        """Collective, alone without `ranks`. Read all of it, on rank 0; return what does not match
        its checksum. None: it has none, or is not local."""

        def test() -> list[str] | None:
            if not self._is_local or (ranks is not None and ranks.rank):
                return None
            return damaged_records(self._path)

        if ranks is None:
            return test()
        damage = ranks.all_or_none("loading a checkpoint", test)
        rank_0_damage: list[str] | None = ranks.all_gather(damage)[0]
        return rank_0_damage

    def _content(self, pickles: bool) -> dict[str, Any]:
        """Return a Lightning checkpoint; a bare state_dict becomes one."""
        content = self._read(pickles)
        path = self._path
        if not isinstance(content, Mapping):
            raise CheckpointError(
                f"{path} holds a {type(content).__name__}, no checkpoint and no state_dict."
            )
        # What torch.save(model.state_dict()) writes, and the .pt files of export.
        if "state_dict" not in content and all(
            isinstance(value, Tensor) for value in content.values()
        ):
            content = {"state_dict": content}
        if not isinstance(content.get("state_dict"), Mapping):
            raise CheckpointError(f"{path} holds no state_dict, only {sorted(map(str, content))}.")
        return dict(content)


class CheckpointFolder:
    """A folder that all ranks have written. marker: see `read_marker`."""

    def __init__(self, path: Path, marker: dict[str, Any]) -> None:
        self.path = path
        self.marker = marker

    def load(self, rank: int, num_ranks: int, pickles: bool = False) -> Loaded:
        """Read it; replicated tensors are read, of sharded ones there are handles."""
        # Generators and loaders of single ranks mean nothing on another number of ranks; rank 0's
        # is read to say so.
        is_same_number = self.marker.get("num_ranks") == num_ranks
        # read_marker compares the sizes of listed files with the disk; others may have been put
        # there by anyone.
        self._must_list({rank_file(0), rank_file(rank if is_same_number else 0)})
        checkpoint = self._state(pickles, reads_replicated=True)
        rank_0_state = read_plain(self.path / rank_file(0))
        rank_state = read_plain(self.path / rank_file(rank)) if is_same_number else None
        return Loaded(checkpoint, rank_state, rank_0_state, self.marker)

    def contents(self, pickles: bool = False) -> Loaded:
        """Read it; of all large tensors there are handles."""
        return Loaded(self._state(pickles, reads_replicated=False), None, None, self.marker)

    def origin(self, pickles: bool = False) -> Origin:
        """Return where it comes from."""
        return _origin(self.path, self.path / MARKER, self.marker, self.marker)

    def find_damage(self, ranks: Ranks | None = None) -> list[str] | None:
        """Collective, alone without `ranks`. Read all files, each rank a share; return those that
        do not match their checksums."""
        if ranks is None:
            return changed_files(self.files())
        files = ranks.all_or_none("loading a checkpoint", self.files)
        return changed_files(files, ranks)

    def files(self) -> list[SummedFile]:
        """Return its files with their checksums."""
        checksums = self.marker.get(CHECKSUMS)
        sizes = self.marker["files"]
        files = []
        for name, size in sizes.items():
            crc32 = checksums.get(name) if isinstance(checksums, dict) else None
            num_blocks = -(-size // BLOCK_BYTES)
            if not isinstance(crc32, list) or len(crc32) != num_blocks:
                problem = f"its marker has no checksums of {name}, but {crc32!r}"
                raise CheckpointError(f"{self.path} is damaged: {problem}.")
            files.append(SummedFile(name, self.path / name, size, crc32))
        return files

    def _state(self, pickles: bool, reads_replicated: bool) -> dict[str, Any]:
        self._must_list({STATE_FILE})
        names = [name for name in self.marker["files"] if name.endswith(SUFFIX)]
        tensors = StoredTensors(self.path, names)

        def stored(reference: Mapping[str, Any]) -> Any:
            shape = tuple(torch.Size(reference["shape"]))  # a TypeError where these are no integers
            handle = tensors.handle(reference[STORED], shape, reference["dtype"])
            # Every rank needs replicated tensors in full; of sharded ones it knows its rectangles
            # only later.
            return handle.read() if reads_replicated and not reference[CHUNKED] else handle

        # The file may hold any nesting of plain types, so that each access may fail in its own way.
        try:
            checkpoint = insert_tensors(read_plain(self.path / STATE_FILE, pickles), stored)
            if not isinstance(checkpoint, dict) or not isinstance(
                checkpoint["state_dict"], Mapping
            ):
                raise TypeError("no dict")
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{self.path} is damaged: {STATE_FILE} is not as written ({error!r})."
            ) from error
        return checkpoint

    def _must_list(self, names: set[str]) -> None:
        missing = sorted(names - self.marker["files"].keys())
        if missing:
            raise CheckpointError(
                f"{self.path} is damaged: its list of files lacks {', '.join(missing)}."
            )


def _read_pickles(archive: zipfile.ZipFile) -> None:
    """Read all but tensors, which compares it with its checksum."""
    for name in archive.namelist():
        if name.endswith(PICKLE):
            archive.read(name)


StoredCheckpoint = CheckpointFile | CheckpointFolder
"""A checkpoint on disk, of whichever form. All methods work on this rank alone, and raise
CheckpointError.

pickles: whether it may hold any types, whose code is run.
"""


def _origin(path: Path, last_written: Path, facts: object, content: Mapping[str, Any]) -> Origin:
    try:
        # Without a label no job looks for its step, which files of other programs need not have.
        job = facts.get("job", "") if isinstance(facts, Mapping) else ""
        return Origin(
            str(job), int(content["global_step"]) if job else 0, last_written.stat().st_mtime
        )
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: its step is not known ({error!r}).") from error


def _read_file(path: Path, pickles: bool) -> object:
    if path.suffix == SUFFIX:
        return {"state_dict": read_safetensors(path)}
    return read_plain(path, pickles)
