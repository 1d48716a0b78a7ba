"""Reads a checkpoint: our own folders on any number of ranks, and plain files of torch, Lightning or safetensors.

Nothing is gathered: every rank reads from the file system what it needs, tables by the rectangle.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from lightning_distrec.checkpoint.folders import read_marker
from lightning_distrec.checkpoint.save import STATE_FILE, rank_file
from lightning_distrec.checkpoint.shards import read_as
from lightning_distrec.checkpoint.skeleton import put_back, read_plain
from lightning_distrec.checkpoint.storage import METADATA_FILE, StoredTensors
from lightning_distrec.chunks import Part, Whole, fill_from
from lightning_distrec.errors import CheckpointError

SAFETENSORS = ".safetensors"


@dataclass(frozen=True, eq=False)
class Stored:
    """A tensor in a checkpoint's folder."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    tensors: StoredTensors

    def size(self) -> torch.Size:
        """Return the shape, as Tensor.size does."""
        return torch.Size(self.shape)

    def fill(self, parts: Sequence[Part]) -> None:
        """Read what lies in `parts`; what lies outside of the tensor in the file stays as it is."""
        self.tensors.read({self.name: parts})

    def __deepcopy__(self, memo: dict[int, Any]) -> "Stored":
        return self  # a callback of Lightning's copies whole states before it loads them

    def whole(self) -> Tensor:
        """Read and return the tensor, on the host."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.fill([Part((0,) * len(self.shape), tensor)])
        return tensor


@dataclass(frozen=True, eq=False)
class Mapped:
    """A tensor of a plain file, mapped into memory: only what is copied from it is read."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's shape."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The tensor's type."""
        return self.tensor.dtype

    def size(self) -> torch.Size:
        """Return the shape, as Tensor.size does."""
        return self.tensor.size()

    def fill(self, parts: Sequence[Part]) -> None:
        """Copy what lies in `parts`; what lies outside of the tensor in the file stays as it is."""
        fill_from(self.tensor, parts)

    def whole(self) -> Tensor:
        """Return the tensor."""
        return self.tensor


class SafeSlices:
    """A tensor of a safetensors file, read by the slice."""

    def __init__(self, file: Any, key: str, dtype: torch.dtype) -> None:
        self._file, self._key = file, key
        self._slices = slices = file.get_slice(key)
        self.shape = tuple(slices.get_shape())
        self.dtype = dtype

    def size(self) -> torch.Size:
        """Return the shape, as Tensor.size does."""
        return torch.Size(self.shape)

    def fill(self, parts: Sequence[Part]) -> None:
        """Read what lies in `parts`; what lies outside of the tensor in the file stays as it is."""
        for part in parts:
            ends = [min(o + s, n) for o, s, n in zip(part.offsets, part.tensor.shape, self.shape, strict=True)]
            box = tuple(slice(first, end) for first, end in zip(part.offsets, ends, strict=True))
            if all(s.stop > s.start for s in box):
                piece = self._slices[box]
                with torch.no_grad():
                    part.tensor[tuple(slice(0, size) for size in piece.shape)].copy_(piece)

    def whole(self) -> Tensor:
        """Read and return the tensor, on the host."""
        tensor: Tensor = self._slices[:] if self.shape else self._file.get_tensor(self._key)
        return tensor


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint holds."""

    checkpoint: dict[str, Any]
    """As it was saved; what was in parts is not read yet, but a `Whole` to read from."""
    of_rank: dict[str, Any] | None
    """What this rank alone had saved; None on another number of ranks, and for plain files."""
    of_first: dict[str, Any] | None
    """What rank 0 alone had saved; None for plain files."""
    marker: dict[str, Any] | None
    """What a folder says of itself; None for plain files."""


def load(path: Path, rank: int, num_ranks: int) -> Loaded:
    """Read a checkpoint, without its tables, on this rank alone. Raises CheckpointError: see `read_marker`."""
    if path.is_dir():
        return _load_folder(path, rank, num_ranks)
    if not path.exists():
        raise CheckpointError(f"there is no checkpoint {path}.")
    return Loaded(_load_file(path), None, None, None)


def _load_folder(path: Path, rank: int, num_ranks: int) -> Loaded:
    marker = read_marker(path)
    alike = marker.get("num_ranks") == num_ranks
    _must_list(path, marker, {STATE_FILE, METADATA_FILE, rank_file(0), rank_file(rank if alike else 0)})
    tensors = StoredTensors(path)
    _must_list(path, marker, tensors.files)

    def stored(stand_in: Mapping[str, Any]) -> Any:
        handle = handle_of(stand_in, path, tensors)
        return handle if stand_in["parted"] else handle.whole()

    try:
        checkpoint = put_back(read_plain(path / STATE_FILE), stored)
        if not isinstance(checkpoint, dict) or not isinstance(checkpoint["state_dict"], Mapping):
            raise TypeError("no dict")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {STATE_FILE} is not as it was written ({error!r}).") from error
    of_first = read_plain(path / rank_file(0))
    of_rank = read_plain(path / rank_file(rank)) if alike else None
    return Loaded(checkpoint, of_rank, of_first, marker)


def handle_of(stand_in: Mapping[str, Any], path: Path, tensors: StoredTensors) -> Stored:
    """Return the tensor that stands in a folder's state by name, shape and type.

    Raises CheckpointError: the folder at `path` has it in another shape, or not at all; KeyError, TypeError: it is not
    said as it was written.
    """
    shape = tuple(torch.Size(stand_in["shape"]))  # a TypeError where it is no whole numbers
    handle = Stored(stand_in["__stored__"], shape, stand_in["dtype"], tensors)
    if (found := tuple(tensors.entry(handle.name).size)) != shape:
        raise CheckpointError(f"{path} is damaged: '{handle.name}' is {found}, not {shape}.")
    return handle


def _must_list(path: Path, marker: Mapping[str, Any], names: set[str]) -> None:
    if missing := sorted(names - marker["files"].keys()):
        raise CheckpointError(f"{path} is damaged: its list of files lacks {', '.join(missing)}.")


def _load_file(path: Path) -> dict[str, Any]:
    """Return a Lightning checkpoint, whole tensors as handles; a bare state_dict becomes one."""
    if path.suffix == SAFETENSORS:
        return {"state_dict": _safetensors(path)}
    content = read_plain(path)
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
        if kind not in _SAFE_TYPES:
            raise CheckpointError(f"{path}: '{key}' has the type {kind}, which is not known here.")
    return {key: SafeSlices(file, key, _SAFE_TYPES[kind]) for key, kind in types.items()}


_SAFE_TYPES = {
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


def as_whole(value: Any) -> Whole | None:
    """Return what can be read of `value` by the rectangle: a handle, or a tensor that is here; None for others."""
    if isinstance(value, Tensor):
        return Mapped(value)
    return value if isinstance(value, (Stored, Mapped, SafeSlices)) else None


def materialised(value: Any) -> Any:
    """Return the tensor of a handle, `value` itself for anything else."""
    return value.whole() if isinstance(value, (Stored, Mapped, SafeSlices)) else value


def placed(value: Any, parameter: Any) -> Any:
    """Return the tensor of a handle as it belongs to `parameter`: of a DTensor, this rank's part is read.

    Tensors of other shapes than the parameter's (of an optimizer's state) are whole on every rank.
    """
    whole = None if isinstance(value, DTensor) else as_whole(value)
    if whole is None or not isinstance(parameter, DTensor) or not whole.shape:
        return materialised(value)
    if tuple(whole.shape) == tuple(parameter.shape):
        return read_as(whole, parameter)
    mesh = parameter.device_mesh
    return DTensor.from_local(whole.whole().to(parameter.to_local().device), mesh, [Replicate()] * mesh.ndim)
