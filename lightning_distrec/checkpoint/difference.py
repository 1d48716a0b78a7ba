"""A checkpoint by difference: the rows of tables that have changed since a full checkpoint, laid
over it when read."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_distrec.checkpoint.atomic_folder import read_marker
from lightning_distrec.checkpoint.checksums import SummedFile
from lightning_distrec.checkpoint.lazy_tensors import as_lazy, collect_tensors
from lightning_distrec.checkpoint.load import CheckpointFolder, Loaded
from lightning_distrec.checkpoint.plain_state import map_nested
from lightning_distrec.chunks import Chunk, LazyTensor, narrowed, overlap, row_ranges
from lightning_distrec.errors import CheckpointError

INCREMENTAL = "incremental"
"""Key in the marker."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Of a full checkpoint, or of a difference, in a series of one job."""

    id: str
    """Drawn for each; a folder that was replaced under the same name has another."""
    series: str
    """What all checkpoints of one job say."""
    base_name: str = ""
    """The folder of the full checkpoint that a difference is to be laid over, next to its own; ""
    for a full one."""
    base_id: str = ""
    changed: dict[str, int]
    """Full name of a table -> rows that the difference has of it; the other tables are in it in
    full."""

    @property
    def is_difference(self) -> bool:
        """Whether it needs a base."""
        return bool(self.base_name)


def read_mark(path: Path, marker: Mapping[str, Any] | None) -> Mark | None:
    """Return what a marker says, None for checkpoints of no series. Raises CheckpointError: it is
    damaged."""
    fields = (marker or {}).get(INCREMENTAL)
    if fields is None:
        return None
    try:
        mark = Mark(**fields)
        texts = (mark.id, mark.series, mark.base_name, mark.base_id)
        if not mark.id or any(not isinstance(text, str) for text in texts):
            raise TypeError("no text")
        # A marker is text that anyone may edit: its base must not lead out of the folder of the
        # difference.
        if os.path.basename(mark.base_name) != mark.base_name or not isinstance(mark.changed, dict):
            raise TypeError(f"a base {mark.base_name!r}")
    except TypeError as error:
        raise CheckpointError(
            f"{path} is damaged: its marker says {fields!r} of its base ({error})."
        ) from None
    return mark


CHANGED = "__changed_rows__"
"""Key of a dict in place of a tensor: the tensor's shards, of each where it lies, its changed rows,
their numbers."""
ROW_IDS = "changed_row_ids"
"""Key in a difference: name -> numbers of the changed rows of a shard."""


@dataclass(frozen=True, eq=False)
class ShardRows:
    """Some rows of a rectangle of a tensor."""

    offsets: tuple[int, ...]
    """Where the rectangle begins in the tensor."""
    sizes: tuple[int, ...]
    ids: "RowIds"
    rows: LazyTensor
    """Their values, in the order of the ids: (num_ids, num_columns), or (num_ids,)."""


class RowIds:
    """Rows of a tensor by number, ascending; read once. first, count: the rows that they are of."""

    def __init__(self, lazy: LazyTensor, first: int, count: int) -> None:
        self._lazy = lazy
        self._first = first
        self._count = count

    @cached_property
    def numbers(self) -> Tensor:
        """Return the numbers, (num_ids,). Raises CheckpointError: they are damaged."""
        ids = self._lazy.read().long()
        # First and last are enough, since the next check makes sure that the numbers ascend.
        outside = ids.numel() and (
            int(ids[0]) < self._first or int(ids[-1]) >= self._first + self._count
        )
        if outside or bool((ids[1:] <= ids[:-1]).any()):
            raise CheckpointError(
                "a difference is damaged: the numbers of its rows are not as they were written."
            )
        return ids


class PatchedTensor(LazyTensor):
    """A tensor of one checkpoint with rows of a later one in their places."""

    def __init__(self, base: LazyTensor, shards: Sequence[ShardRows]) -> None:
        self._base = base
        self._shards = shards
        self.shape = tuple(base.shape)
        self.dtype = base.dtype

    @override
    def read_into(self, chunks: Sequence[Chunk]) -> None:
        # The base first, for rows of the difference overwrite its rows.
        self._base.read_into(chunks)
        for shard in self._shards:
            for chunk in chunks:
                _put_rows(chunk, shard)


def _put_rows(chunk: Chunk, shard: ShardRows) -> None:
    """Write the shard's rows that lie in a chunk of the tensor into it."""
    box = overlap((shard.offsets, shard.sizes), chunk.box)
    if box is None:
        return
    target = narrowed(chunk.tensor.detach(), chunk.offsets, box)
    (first, *first_column), (count, *num_columns) = box
    ids = shard.ids.numbers
    # Ids ascend, see RowIds: those in a rectangle follow each other, and so do their rows in the
    # file.
    bounds = torch.tensor([first, first + count])
    begin, end = torch.searchsorted(ids, bounds).tolist()
    row_shape = shard.sizes[1:]
    dtype = shard.rows.dtype
    for start, number in row_ranges((end - begin, *row_shape), dtype.itemsize):
        position = begin + start
        values = torch.empty((number, *row_shape), dtype=dtype)
        shard.rows.read_into([Chunk((position, *[0] * len(row_shape)), values)])
        # Ids count the table's rows, `target` begins at row `first` of it.
        places = ids[position : position + number] - first
        if row_shape:
            values = values.narrow(1, first_column[0] - shard.offsets[1], num_columns[0])
        target[places.to(target.device)] = values.to(target.device, target.dtype)


class Difference(CheckpointFolder):
    """A folder with the changed rows of tables, to be laid over the full checkpoint next to it that
    its mark names."""

    def __init__(self, path: Path, marker: dict[str, Any], mark: Mark) -> None:
        super().__init__(path, marker)
        self._mark = mark

    @override
    def load(self, rank: int, num_ranks: int, pickles: bool = False) -> Loaded:
        """Read it with its base."""
        return self._lay_over_base(super().load(rank, num_ranks, pickles), pickles)

    @override
    def contents(self, pickles: bool = False) -> Loaded:
        return self._lay_over_base(super().contents(pickles), pickles)

    @override
    def files(self) -> list[SummedFile]:
        base = self._base()
        files = super().files()
        for file in base.files():
            files.append(file._replace(label=f"{file.label} of its base {base.path.name}"))
        return files

    def _base(self) -> CheckpointFolder:
        """Return the full checkpoint. Raises CheckpointError: it is not the one, or damaged."""
        # Resolved, because last.ckpt may be a link into another folder, and the base lies next to
        # its target.
        path = self.path
        base_path = self.path.resolve().parent / self._mark.base_name
        try:
            base = CheckpointFolder(base_path, read_marker(base_path))
            mark = read_mark(base_path, base.marker)
        except CheckpointError as error:
            raise CheckpointError(
                f"{path} is a difference, and its base {base_path} cannot be read: {error} Keep "
                "the two in one folder."
            ) from error
        if mark is None or mark.id != self._mark.base_id:
            raise CheckpointError(
                f"{path} is a difference, and {base_path} is not its base but another checkpoint "
                "of that name."
            )
        return base

    def _lay_over_base(self, loaded: Loaded, pickles: bool) -> Loaded:
        """Return a checkpoint with tensors of its base where the difference has some rows only."""
        path = self.path
        base = self._base()
        # Handles of the base's large tensors: nothing of them is read before a rank asks for its
        # rectangle.
        base_tensors = collect_tensors(base.contents(pickles).checkpoint)
        ids: dict[str, Any] = {}
        # Weights and optimizer state of a shard have their ids in common; these are read once for
        # all.
        read_ids: dict[str, RowIds] = {}

        def patch(leaf: Any, place: str) -> Any:
            if not (isinstance(leaf, Mapping) and CHANGED in leaf):
                return leaf
            base_tensor = base_tensors.get(place)
            if base_tensor is None or tuple(base_tensor.shape) != tuple(leaf["shape"]):
                raise CheckpointError(
                    f"{path} is a difference of '{place}', which its base {base.path} has not."
                )
            shards = [_shard_rows(shard, ids, read_ids) for shard in leaf[CHANGED]]
            return PatchedTensor(base_tensor, shards)

        try:
            for name, value in loaded.checkpoint.pop(ROW_IDS, {}).items():
                ids[name] = as_lazy(value)
            checkpoint = map_nested(loaded.checkpoint, patch, leaf_keys=frozenset({CHANGED}))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is damaged: its rows are not as they were written ({error!r})."
            ) from error
        return replace(loaded, checkpoint=checkpoint)


def _shard_rows(
    shard: Mapping[str, Any], ids: Mapping[str, Any], read_ids: dict[str, RowIds]
) -> ShardRows:
    offsets = tuple(shard["offsets"])
    sizes = tuple(shard["sizes"])
    rows = as_lazy(shard["rows"])
    name = shard["ids"]
    numbers = ids[name]
    expected_shape = (*numbers.shape, *sizes[1:])
    if rows is None or tuple(rows.shape) != expected_shape or len(offsets) != len(sizes):
        raise ValueError(f"rows of {offsets}")
    if name not in read_ids:
        read_ids[name] = RowIds(numbers, offsets[0], sizes[0])
    return ShardRows(offsets, sizes, read_ids[name], rows)
