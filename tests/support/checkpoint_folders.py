"""Checkpoint folders written by one process without a process group, tables cut as on several
ranks."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_distrec.checkpoint.atomic_folder import (
    CHECKSUMS,
    MARKER,
    MARKER_CHECKSUM,
    marker_crc32,
)
from lightning_distrec.checkpoint.checksums import read_checksums
from lightning_distrec.checkpoint.save import RankContent, take_folder_snapshot
from lightning_distrec.chunks import Chunk, ChunkedTensor


class SingleRank:
    """The only rank."""

    rank = 0
    num_ranks = 1
    group = None

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    def all_or_none(self, activity: str, action: Any) -> Any:
        return action()


def by_rows(tensor: Tensor, *ends: int) -> ChunkedTensor:
    """Return a tensor cut before the rows `ends`."""
    bounds = [0, *ends, len(tensor)]
    chunks = [
        Chunk((first, *[0] * (tensor.dim() - 1)), tensor[first:end])
        for first, end in zip(bounds, bounds[1:], strict=False)
    ]
    return ChunkedTensor(tuple(tensor.shape), tensor.dtype, chunks)


def by_columns(tensor: Tensor, *ends: int) -> ChunkedTensor:
    """Return a table cut before the columns `ends`."""
    bounds = [0, *ends, tensor.shape[1]]
    chunks = [
        Chunk((0, first), tensor[:, first:end])
        for first, end in zip(bounds, bounds[1:], strict=False)
    ]
    return ChunkedTensor(tuple(tensor.shape), tensor.dtype, chunks)


def write_folder(path: Path, checkpoint: dict[str, Any], **marker: Any) -> Path:
    """Write a checkpoint's folder; returns its path. marker: what it says of itself besides what is
    needed."""
    whole = {
        "epoch": 2,
        "global_step": 30,
        "pytorch-lightning_version": "2.6.0",
        "loops": {},
        **checkpoint,
    }
    marker = {
        "epoch": whole["epoch"],
        "global_step": whole["global_step"],
        "versions": "torch 2.13.0",
        **marker,
    }
    content = RankContent(path=path.absolute(), checkpoint=whole, facts=marker)
    take_folder_snapshot(content, SingleRank()).write(SingleRank())
    return path


def edit_marker(folder: Path, edit: Callable[[dict[str, Any]], Any] = lambda marker: None) -> None:
    """Change what a marker says, with all checksums of the folder: as who forges a checkpoint
    would."""
    marker = json.loads((folder / MARKER).read_text())
    del marker[MARKER_CHECKSUM]
    edit(marker)
    files = {name: folder / name for name in marker["files"] if (folder / name).is_file()}
    marker[CHECKSUMS] = {name: read_checksums(file) for name, file in files.items()}
    (folder / MARKER).write_text(json.dumps({**marker, MARKER_CHECKSUM: marker_crc32(marker)}))
