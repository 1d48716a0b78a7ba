"""Writes a difference and its base as one full checkpoint, in one process, with little memory."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_distrec.atomic_files import write_file
from lightning_distrec.checkpoint.atomic_folder import CHECKSUMS, UnfinishedFolder
from lightning_distrec.checkpoint.contents import open_checkpoint, read_contents, verify
from lightning_distrec.checkpoint.difference import CHANGED, INCREMENTAL, ROW_IDS, Difference
from lightning_distrec.checkpoint.lazy_tensors import collect_tensors
from lightning_distrec.checkpoint.plain_state import CHUNKED, STORED, map_nested, read_plain, to_bytes
from lightning_distrec.checkpoint.save import PLAN_FILE, STATE_FILE, rank_file
from lightning_distrec.checkpoint.storage import write_tensors
from lightning_distrec.chunks import Chunk, ChunkedTensor, LazyTensor
from lightning_distrec.errors import CheckpointError


def merge(source: Path, target: Path) -> None:
    """Write what the difference `source` stands for into the folder `target`, or raise CheckpointError."""
    difference = open_checkpoint(source)
    if not isinstance(difference, Difference):
        raise CheckpointError(f"{source} is no difference: there is nothing to merge it with.")
    if target.exists():
        raise CheckpointError(f"{target} exists already. Choose another name.")
    # Written again, damaged rows would get checksums that match, and nobody could find them any more.
    if changed := verify(source):
        raise CheckpointError(f"{source} is damaged: {changed[0]} does not match its checksum.")
    handles = collect_tensors(read_contents(source).checkpoint)
    state, tensors = _full_state(read_plain(source / STATE_FILE), handles)
    marker = difference.marker
    copied = [PLAN_FILE, *(rank_file(rank) for rank in range(marker["num_ranks"]))]
    sizes = {name: [list(full.shape), str(full.dtype).removeprefix("torch.")] for name, full in tensors.items()}
    # UnfinishedFolder writes these keys for the new folder; without INCREMENTAL it belongs to no series.
    content = {key: value for key, value in marker.items() if key not in ("format", "name", "files", INCREMENTAL)}
    unfinished = None
    try:
        unfinished = UnfinishedFolder(target.absolute())
        crc32 = write_tensors(unfinished.path, tensors, None, target)()
        write_file(unfinished.path / STATE_FILE, to_bytes(state))
        for name in (name for name in copied if name in marker["files"]):
            shutil.copyfile(source / name, unfinished.path / name)
        unfinished.complete(content | {"tensors": sizes, CHECKSUMS: crc32})
    except OSError as error:
        raise CheckpointError(f"{target} cannot be written: {error}. No folder was left there.") from error
    finally:
        if unfinished is not None:
            unfinished.abandon()


def _full_state(raw: Any, handles: Mapping[str, LazyTensor]) -> tuple[Any, dict[str, ChunkedTensor]]:
    """Return a difference's state as a full one's, and its tensors, read when written. handles: of both, by place."""
    tensors: dict[str, ChunkedTensor] = {}

    def put(item: Any, place: str) -> Any:
        if not isinstance(item, Mapping) or (STORED not in item and CHANGED not in item):
            return map_nested(item, place, put)
        lazy = handles[place]
        shape = tuple(lazy.shape)
        # The writer slices and detaches what it takes for a tensor, a block at a time: reading happens there.
        later: Any = _LazyRows(lazy, 0, shape)
        tensors[place] = ChunkedTensor(shape, lazy.dtype, [Chunk((0,) * len(shape), later)])
        return {STORED: place, "shape": shape, "dtype": lazy.dtype, CHUNKED: item.get(CHUNKED, True)}

    state = put({key: value for key, value in raw.items() if key != ROW_IDS}, "")
    return state, tensors


@dataclass(frozen=True)
class _LazyRows:
    """Rows of a tensor in a file, with what the writer asks of a tensor; `detach` reads them."""

    lazy: LazyTensor
    first: int
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return self.lazy.dtype.itemsize

    def numel(self) -> int:
        return self.size().numel()

    def size(self) -> torch.Size:
        return torch.Size(self.shape)

    def __getitem__(self, rows: slice) -> "_LazyRows":
        # WritePlanner's slices have a start and a stop, and no step.
        return _LazyRows(self.lazy, self.first + rows.start, (rows.stop - rows.start, *self.shape[1:]))

    def detach(self) -> Tensor:
        tensor = torch.empty(self.shape, dtype=self.lazy.dtype)
        self.lazy.read_into([Chunk((self.first, *[0] * (len(self.shape) - 1)), tensor)])
        return tensor
