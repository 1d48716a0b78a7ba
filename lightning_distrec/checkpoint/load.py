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
    ByteRange,
    changed_ranges,
    has_checksums,
    read_archive,
)
from lightning_distrec.checkpoint.hyperparameters import EXTRA
from lightning_distrec.checkpoint.lazy_tensors import SafetensorsTensor, StoredTensor
from lightning_distrec.checkpoint.plain_state import (
    CHUNKED,
    STORED,
    from_bytes,
    insert_tensors,
    read_plain,
)
from lightning_distrec.checkpoint.save import STATE_FILE, rank_file
from lightning_distrec.checkpoint.single_file import split_extra
from lightning_distrec.checkpoint.storage import METADATA_FILE, StoredTensors
from lightning_distrec.errors import CheckpointError, require

PICKLE = "/data.pkl in "
"""In the label of the record that has all but tensors."""
SAFETENSORS = ".safetensors"
SAFETENSORS_TYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of types, in the order in which the library writes them: large ones first, so that each
tensor is aligned."""


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
        self._path, self._is_local, self._read = (
            path,
            read is None,
            read or partial(_read_file, path),
        )

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
        if changed_ranges([item for item in self.ranges() if PICKLE in item.label]):
            raise CheckpointError(
                f"{self._path} is damaged: what it says of itself does not match its checksum."
            )
        content = self._content(pickles)
        return _origin(self._path, self._path, content.get(EXTRA), content)

    def ranges(self) -> list[ByteRange]:
        """Return all of it that has a checksum; nothing of files of other formats, and of those
        that `read` reads."""
        return _archive(self._path) if self._is_local else []

    def _content(self, pickles: bool) -> dict[str, Any]:
        """Return a Lightning checkpoint; a bare state_dict becomes one."""
        content, path = self._read(pickles), self._path
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
        self.path, self.marker = path, marker

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

    def ranges(self) -> list[ByteRange]:
        """Return all of it that has a checksum: every file, but for those that early versions have
        not listed."""
        path, crc32, sizes = self.path, self.marker.get(CHECKSUMS, {}), self.marker["files"]
        if not isinstance(crc32, dict) or not crc32.keys() <= sizes.keys():
            raise CheckpointError(f"{path} is damaged: its marker has no checksums, but {crc32!r}.")
        ranges = [
            ByteRange(name, path / name, 0, sizes[name], checksum)
            for name, checksum in crc32.items()
        ]
        unlisted = sizes.keys() - crc32.keys()
        for name in sorted(name for name in unlisted if name.endswith(".pt")):
            ranges += _archive(path / name)
        places = StoredTensors(path).places if unlisted else {}
        for (name, _), (file_name, begin, length) in places.items():
            ranges += _archive(path / file_name, f"'{name}' in {file_name}", begin, length)
        return ranges

    def _state(self, pickles: bool, reads_replicated: bool) -> dict[str, Any]:
        self._must_list({STATE_FILE, METADATA_FILE})
        tensors = StoredTensors(self.path)
        # The metadata name files as well: each must be one of those that the marker lists.
        self._must_list(tensors.files)

        def stored(reference: Mapping[str, Any]) -> Any:
            shape = tuple(torch.Size(reference["shape"]))  # a TypeError where these are no integers
            handle = StoredTensor(reference[STORED], shape, reference["dtype"], tensors)
            # State and metadata are two files: if they are of two checkpoints, it shows here.
            if (stored_shape := tuple(tensors.entry(handle.name).size)) != shape:
                raise CheckpointError(
                    f"{self.path} is damaged: '{handle.name}' is {stored_shape}, not {shape}."
                )
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
        if missing := sorted(names - self.marker["files"].keys()):
            raise CheckpointError(
                f"{self.path} is damaged: its list of files lacks {', '.join(missing)}."
            )


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


def _archive(path: Path, label: str = "", *place: int) -> list[ByteRange]:
    """Return the records of an archive; none where it was saved without checksums, or in torch's
    older format."""
    records = read_archive(path, *place) if zipfile.is_zipfile(path) else []
    if not has_checksums(records):
        return []
    return [record._replace(label=label or f"{record.label} in {path.name}") for record in records]


def _read_file(path: Path, pickles: bool) -> object:
    return (
        {"state_dict": _safetensors(path)}
        if path.suffix == SAFETENSORS
        else read_plain(path, pickles)
    )


def _safetensors(path: Path) -> dict[str, Any]:
    require("safetensors", f"reading {path}")
    from safetensors import SafetensorError, safe_open

    try:
        # Reads the header alone. The handles keep the file open, and read their slices later.
        file = safe_open(path, framework="pt")
        types = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118  it is no dict
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}.") from None
    dtypes = {name: dtype for dtype, name in SAFETENSORS_TYPES.items()}
    if unknown := next((key for key, kind in types.items() if kind not in dtypes), None):
        raise CheckpointError(
            f"{path}: '{unknown}' has the type {types[unknown]}, which is not supported."
        )
    return {key: SafetensorsTensor(file, key, dtypes[kind]) for key, kind in types.items()}
