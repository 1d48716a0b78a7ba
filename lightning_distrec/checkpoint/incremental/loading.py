"""Lays a difference over its base: handles of tensors that read both, for all who read checkpoints."""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_distrec.checkpoint import load as of_one
from lightning_distrec.checkpoint.incremental.marks import base_of, mark_of
from lightning_distrec.checkpoint.incremental.packed_rows import UnpackedRows
from lightning_distrec.checkpoint.lazy_tensors import PatchedTensor, RowIds, ShardRows, as_lazy, stored_tensor
from lightning_distrec.checkpoint.load import Loaded
from lightning_distrec.checkpoint.plain_state import insert_tensors, map_nested, read_plain
from lightning_distrec.checkpoint.save import STATE_FILE
from lightning_distrec.checkpoint.storage import StoredTensors, matches_checksums
from lightning_distrec.chunks import LazyTensor
from lightning_distrec.errors import CheckpointError

CHANGED = "__changed_rows__"
"""Key of a dict in place of a tensor: the tensor's shards, of each where it lies, its changed rows, their numbers."""
ROW_IDS = "changed_row_ids"
"""Key in a difference: name -> numbers of the changed rows of a shard."""


def load(path: Path, rank: int, num_ranks: int, pickles: bool = False) -> Loaded:
    """Read a checkpoint as `checkpoint.load.load` does, a difference with its base.

    The checksums of a difference's chunks are compared, each by one of the ranks. Raises CheckpointError also where
    the base is missing, or another one.
    """
    loaded = of_one.load(path, rank, num_ranks, pickles)
    mark = mark_of(path, loaded.marker)
    if mark is None or not mark.is_difference:
        return loaded
    for name, record in StoredTensors(path).records(rank, num_ranks):
        if not matches_checksums(record):
            raise CheckpointError(f"{path} is damaged: {name} does not match its checksum.")
    if mark.row_bits != 32 and rank == 0:
        warnings.warn(
            f"{path} has its changed rows in {mark.row_bits} bits a number (checkpoint: incremental: row_bits): what "
            "resumes from it is near the run that never stopped, and not equal to it.",
            stacklevel=2,
        )
    return replace(loaded, checkpoint=with_base(path, loaded.checkpoint, loaded.marker, pickles))


def with_base(
    path: Path, checkpoint: dict[str, Any], marker: Mapping[str, Any] | None, pickles: bool = False
) -> dict[str, Any]:
    """Return a checkpoint, as it was read from its folder, with tensors of its base where it has some rows only."""
    mark = mark_of(path, marker)
    if mark is None or not mark.is_difference:
        return checkpoint
    base, _ = base_of(path, mark)
    tensors = StoredTensors(base)
    state = insert_tensors(read_plain(base / STATE_FILE, pickles), lambda given: stored_tensor(given, base, tensors))
    handles = _handles(state)
    try:
        ids = {name: as_lazy(value) for name, value in checkpoint.pop(ROW_IDS, {}).items()}
        known: dict[str, RowIds] = {}

        def put(item: Any, where: str) -> Any:
            if not (isinstance(item, Mapping) and CHANGED in item):
                return map_nested(item, where, put)
            if where not in handles or tuple(handles[where].shape) != tuple(item["shape"]):
                raise CheckpointError(f"{path} is a difference of '{where}', which its base {base} has not.")
            dtype = handles[where].dtype
            return PatchedTensor(handles[where], [_shard_rows(shard, ids, known, dtype) for shard in item[CHANGED]])

        patched: dict[str, Any] = put(checkpoint, "")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: its rows are not as they were written ({error!r}).") from error
    return patched


def _shard_rows(
    shard: Mapping[str, Any], ids: Mapping[str, Any], known: dict[str, RowIds], dtype: torch.dtype
) -> ShardRows:
    offsets, sizes, name = tuple(shard["offsets"]), tuple(shard["sizes"]), shard["ids"]
    rows, numbers = as_lazy(shard["rows"]), ids[name]
    if rows is not None and shard.get("bits", 32) == 8:
        if rows.dtype != torch.uint8 or len(rows.shape) != 2:
            raise ValueError(f"packed rows of {offsets}")
        rows = UnpackedRows(rows, dtype)
    if rows is None or tuple(rows.shape) != (*numbers.shape, *sizes[1:]) or len(offsets) != len(sizes):
        raise ValueError(f"rows of {offsets}")
    if name not in known:
        known[name] = RowIds(numbers, offsets[0], sizes[0])
    return ShardRows(offsets, sizes, known[name], rows)


def _handles(value: Any) -> dict[str, LazyTensor]:
    found: dict[str, LazyTensor] = {}

    def look(item: Any, where: str) -> Any:
        if (lazy := as_lazy(item)) is not None:
            found[where] = lazy
            return item
        return map_nested(item, where, look)

    look(value, "")
    return found
