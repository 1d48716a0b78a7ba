"""Opens checkpoints of all forms. A difference is laid over its base by handles of tensors that read both."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lightning_distrec.checkpoint.incremental.marks import Mark, mark_of
from lightning_distrec.checkpoint.incremental.packed_rows import UnpackedRows
from lightning_distrec.checkpoint.lazy_tensors import PatchedTensor, RowIds, ShardRows, as_lazy, tensors_of
from lightning_distrec.checkpoint.load import CheckpointFile, CheckpointFolder, Loaded, Origin, StoredCheckpoint
from lightning_distrec.checkpoint.plain_state import map_nested
from lightning_distrec.checkpoint.storage import StoredTensors, matches_checksums
from lightning_distrec.errors import CheckpointError, MissingCheckpointError

CHANGED = "__changed_rows__"
"""Key of a dict in place of a tensor: the tensor's shards, of each where it lies, its changed rows, their numbers."""
ROW_IDS = "changed_row_ids"
"""Key in a difference: name -> numbers of the changed rows of a shard."""


def open_checkpoint(path: Path) -> StoredCheckpoint:
    """Return a checkpoint on disk, of whichever form. Raises CheckpointError: see `read_marker`; there is none."""
    if not path.is_dir():
        if not path.exists():
            raise MissingCheckpointError(f"there is no checkpoint {path}.")
        return CheckpointFile(path)
    folder = CheckpointFolder(path)
    mark = mark_of(path, folder.marker)
    return Difference(folder, mark) if mark is not None and mark.is_difference else folder


class Difference:
    """A folder with the changed rows of tables, to be laid over the full checkpoint next to it that its mark names."""

    def __init__(self, folder: CheckpointFolder, mark: Mark) -> None:
        self.folder, self._mark = folder, mark

    def load(self, rank: int, num_ranks: int, pickles: bool = False) -> Loaded:
        """Read it with its base. The checksums of the difference's chunks are compared, each by one of the ranks."""
        loaded, path = self.folder.load(rank, num_ranks, pickles), self.folder.path
        for name, record in StoredTensors(path).records(rank, num_ranks):
            if not matches_checksums(record):
                raise CheckpointError(f"{path} is damaged: {name} does not match its checksum.")
        if self._mark.row_bits != 32 and rank == 0:
            warnings.warn(
                f"{path} has its changed rows in {self._mark.row_bits} bits a number, as an earlier version could "
                "write them: what resumes from it is near the run that never stopped, and not equal to it.",
                stacklevel=2,
            )
        return self._laid_over_base(loaded, pickles)

    def contents(self, pickles: bool = False) -> Loaded:
        """Read it with its base."""
        return self._laid_over_base(self.folder.contents(pickles), pickles)

    def origin(self, pickles: bool = False) -> Origin:
        """Return where it comes from."""
        return self.folder.origin(pickles)

    def changed_bytes(self, on_progress: Callable[[int], None]) -> set[str]:
        """Read all of it and of its base, and return what has changed."""
        changed, base = self.folder.changed_bytes(on_progress), self._base()
        return changed | {f"{name} of its base {base.path.name}" for name in base.changed_bytes(on_progress)}

    def _base(self) -> CheckpointFolder:
        """Return the full checkpoint. Raises CheckpointError: it is not the one, or damaged."""
        path, base_path = self.folder.path, self.folder.path.resolve().parent / self._mark.base_name
        try:
            base = CheckpointFolder(base_path)
            mark = mark_of(base_path, base.marker)
        except CheckpointError as error:
            raise CheckpointError(
                f"{path} is a difference, and its base {base_path} cannot be read: {error} Keep the two in one folder."
            ) from error
        if mark is None or mark.id != self._mark.base_id:
            raise CheckpointError(
                f"{path} is a difference, and {base_path} is not its base but another checkpoint of that name. Use "
                "another checkpoint."
            )
        return base

    def _laid_over_base(self, loaded: Loaded, pickles: bool) -> Loaded:
        """Return a checkpoint with tensors of its base where the difference has some rows only."""
        path, base = self.folder.path, self._base()
        base_tensors = tensors_of(base.contents(pickles).checkpoint)
        try:
            ids = {name: as_lazy(value) for name, value in loaded.checkpoint.pop(ROW_IDS, {}).items()}
            read_ids: dict[str, RowIds] = {}

            def patch(item: Any, place: str) -> Any:
                if not (isinstance(item, Mapping) and CHANGED in item):
                    return map_nested(item, place, patch)
                base_tensor = base_tensors.get(place)
                if base_tensor is None or tuple(base_tensor.shape) != tuple(item["shape"]):
                    raise CheckpointError(f"{path} is a difference of '{place}', which its base {base.path} has not.")
                shards = [_shard_rows(shard, ids, read_ids, base_tensor.dtype) for shard in item[CHANGED]]
                return PatchedTensor(base_tensor, shards)

            checkpoint: dict[str, Any] = patch(loaded.checkpoint, "")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{path} is damaged: its rows are not as they were written ({error!r}).") from error
        return replace(loaded, checkpoint=checkpoint)


def _shard_rows(
    shard: Mapping[str, Any], ids: Mapping[str, Any], read_ids: dict[str, RowIds], dtype: torch.dtype
) -> ShardRows:
    offsets, sizes, name = tuple(shard["offsets"]), tuple(shard["sizes"]), shard["ids"]
    rows, numbers = as_lazy(shard["rows"]), ids[name]
    if rows is not None and shard.get("bits", 32) == 8:
        if rows.dtype != torch.uint8 or len(rows.shape) != 2:
            raise ValueError(f"packed rows of {offsets}")
        rows = UnpackedRows(rows, dtype)
    if rows is None or tuple(rows.shape) != (*numbers.shape, *sizes[1:]) or len(offsets) != len(sizes):
        raise ValueError(f"rows of {offsets}")
    if name not in read_ids:
        read_ids[name] = RowIds(numbers, offsets[0], sizes[0])
    return ShardRows(offsets, sizes, read_ids[name], rows)
