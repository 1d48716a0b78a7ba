"""Reads a checkpoint: our own folders on any number of ranks, and plain files of torch, Lightning or safetensors.

Nothing is gathered: every rank reads from the file system what it needs, tables by the rectangle.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_distrec.checkpoint.atomic_folder import MARKER, read_marker
from lightning_distrec.checkpoint.lazy_tensors import SafetensorsTensor, stored_tensor
from lightning_distrec.checkpoint.plain_state import CHUNKED, from_bytes, insert_tensors, read_plain
from lightning_distrec.checkpoint.save import STATE_FILE, rank_file
from lightning_distrec.checkpoint.single_file import EXTRA, split_extra
from lightning_distrec.checkpoint.storage import METADATA_FILE, StoredTensors
from lightning_distrec.errors import CheckpointError, MissingCheckpointError

SAFETENSORS = ".safetensors"


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint holds."""

    checkpoint: dict[str, Any]
    """As it was saved; of sharded tensors there is a `LazyTensor` to read from."""
    rank_state: dict[str, Any] | None
    """What this rank alone had saved; None on another number of ranks, and for files of other programs."""
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


def read_origin(path: Path, pickles: bool = False) -> Origin:
    """Read where a checkpoint comes from, not its tensors. Raises CheckpointError: it is incomplete, or damaged.

    pickles: whether it may hold any types, whose code is run.
    """
    if path.is_dir():
        written, content = (path / MARKER), read_marker(path)
        marker: Any = content
    else:
        written, content = path, _load_file(path, pickles)
        marker = content.get(EXTRA)
    try:
        job = marker.get("job", "") if isinstance(marker, Mapping) else ""
        return Origin(str(job), int(content["global_step"]) if job else 0, written.stat().st_mtime)
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: its step is not known ({error!r}).") from error


def load(path: Path, rank: int, num_ranks: int, pickles: bool = False) -> Loaded:
    """Read a checkpoint, without its tables, on this rank alone.

    pickles: whether it may hold any types, whose code is run. Raises CheckpointError: see `read_marker`.
    """
    if path.is_dir():
        return _load_folder(path, rank, num_ranks, pickles)
    if not path.exists():
        raise MissingCheckpointError(f"there is no checkpoint {path}.")
    return of_content(path, _load_file(path, pickles), rank, num_ranks)


def of_content(path: Path, content: object, rank: int, num_ranks: int) -> Loaded:
    """Return what a file holds whose content has been read. Raises CheckpointError: it is no checkpoint, or damaged."""
    checkpoint, extra = split_extra(path, _as_checkpoint(path, content))
    if extra is None:
        return Loaded(checkpoint, None, None, None)
    try:
        states: list[bytes] = extra["rank_states"]
        same_ranks = len(states) == num_ranks
        rank_0_state = from_bytes(states[0], f"the state of rank 0 in {path}")
        rank_state = from_bytes(states[rank], f"the state of rank {rank} in {path}") if same_ranks else None
    except (KeyError, IndexError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: it lacks the states of its ranks ({error!r}).") from error
    return Loaded(checkpoint, rank_state, rank_0_state, extra)


def _load_folder(path: Path, rank: int, num_ranks: int, pickles: bool) -> Loaded:
    marker = read_marker(path)
    same_ranks = marker.get("num_ranks") == num_ranks
    _must_list(path, marker, {STATE_FILE, METADATA_FILE, rank_file(0), rank_file(rank if same_ranks else 0)})
    tensors = StoredTensors(path)
    _must_list(path, marker, tensors.files)

    def stored(reference: Mapping[str, Any]) -> Any:
        handle = stored_tensor(reference, path, tensors)
        return handle if reference[CHUNKED] else handle.read()

    try:
        checkpoint = insert_tensors(read_plain(path / STATE_FILE, pickles), stored)
        if not isinstance(checkpoint, dict) or not isinstance(checkpoint["state_dict"], Mapping):
            raise TypeError("no dict")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {STATE_FILE} is not as it was written ({error!r}).") from error
    rank_0_state = read_plain(path / rank_file(0))
    rank_state = read_plain(path / rank_file(rank)) if same_ranks else None
    return Loaded(checkpoint, rank_state, rank_0_state, marker)


def _must_list(path: Path, marker: Mapping[str, Any], names: set[str]) -> None:
    if missing := sorted(names - marker["files"].keys()):
        raise CheckpointError(f"{path} is damaged: its list of files lacks {', '.join(missing)}.")


def _load_file(path: Path, pickles: bool) -> dict[str, Any]:
    """Return a Lightning checkpoint; a bare state_dict becomes one. Tensors are mapped into memory, or handles."""
    if path.suffix == SAFETENSORS:
        return {"state_dict": _safetensors(path)}
    return _as_checkpoint(path, read_plain(path, pickles))


def _as_checkpoint(path: Path, content: object) -> dict[str, Any]:
    if not isinstance(content, Mapping):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, and neither a checkpoint nor a state_dict.")
    if "state_dict" not in content and all(isinstance(value, Tensor) for value in content.values()):
        content = {"state_dict": content}
    if not isinstance(content.get("state_dict"), Mapping):
        raise CheckpointError(
            f"{path} holds no state_dict, only {sorted(map(str, content))}: it is neither a checkpoint nor a "
            "state_dict."
        )
    return dict(content)


def _safetensors(path: Path) -> dict[str, Any]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise CheckpointError(f"reading {path} needs the package safetensors: pip install safetensors.") from None
    try:
        file = safe_open(path, framework="pt")
        types = {key: file.get_slice(key).get_dtype() for key in file.keys()}  # noqa: SIM118  it is no dict
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}.") from None
    for key, kind in types.items():
        if kind not in _SAFETENSORS_TYPES:
            raise CheckpointError(f"{path}: '{key}' has the type {kind}, which is not supported.")
    return {key: SafetensorsTensor(file, key, _SAFETENSORS_TYPES[kind]) for key, kind in types.items()}


_SAFETENSORS_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
