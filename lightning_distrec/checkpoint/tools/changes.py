"""Which rows of tables differ between two checkpoints, as ids and vectors: for those who serve the model."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_distrec.checkpoint.incremental.marks import mark_of
from lightning_distrec.checkpoint.lazy_tensors import PatchedTensor, as_lazy
from lightning_distrec.checkpoint.tools.contents import read_contents
from lightning_distrec.checkpoint.tools.describe import description_of
from lightning_distrec.chunks import Chunk, LazyTensor, row_ranges
from lightning_distrec.errors import CheckpointError


def changes_since(source: Path, since: Path, pickles: bool = False) -> dict[str, Any]:
    """Return the weights of `source` that are not those of `since`.

    Of a sharded table `<name>.ids`, (num_changed,) int64, ascending, and `<name>.rows`, (num_changed, dim); they are in
    memory. Other weights in full, where they differ. Of a difference and its base no more than the rows that the
    difference has is read. pickles: whether both may hold any types, whose code is run. Raises CheckpointError: their
    weights have other names or shapes.
    """
    new, old = read_contents(source, pickles), read_contents(since, pickles)
    mine, before = mark_of(source, new.marker), mark_of(since, old.marker)
    is_base = mine is not None and before is not None and mine.is_difference and mine.base_id == before.id
    tables = {tensor.name for tensor in description_of(source, new).tensors if tensor.sharding_type is not None}
    weights, weights_before = new.checkpoint["state_dict"], old.checkpoint["state_dict"]
    if weights.keys() != weights_before.keys():
        raise CheckpointError(
            f"{source} and {since} have weights of other names: {sorted(weights.keys() ^ weights_before.keys())}."
        )
    found: dict[str, Any] = {}
    for name, value in weights.items():
        lazy, lazy_before = as_lazy(value), as_lazy(weights_before[name])
        if lazy is None or lazy_before is None:
            continue
        if tuple(lazy.shape) != tuple(lazy_before.shape) or lazy.dtype != lazy_before.dtype:
            raise CheckpointError(
                f"'{name}' is {tuple(lazy.shape)} in {source}, {tuple(lazy_before.shape)} in {since}."
            )
        if name in tables:
            saved = _rows_of_difference(lazy) if is_base else None
            ids, rows = _changed_rows(lazy, lazy_before) if saved is None else saved
            found |= {f"{name}.ids": ids, f"{name}.rows": rows} if len(ids) else {}
        elif not _same_bits(lazy.read(), lazy_before.read()):
            found[name] = value
    return found


def _rows_of_difference(lazy: LazyTensor) -> tuple[Tensor, Tensor] | None:
    """Return the rows that a difference has of a table; None where it has the table in full."""
    if not isinstance(lazy, PatchedTensor):
        return None
    ids = torch.cat([torch.empty(0, dtype=torch.long), *(shard.ids.read() for shard in lazy.shards)]).unique()
    rows = torch.empty((len(ids), *lazy.shape[1:]), dtype=lazy.dtype)
    num_columns = torch.zeros(len(ids), dtype=torch.long)
    for shard in lazy.shards:
        places, (first, width) = torch.searchsorted(ids, shard.ids.read()), (shard.offsets[1], shard.sizes[1])
        rows[places, first : first + width] = shard.rows.read()
        num_columns[places] += width
    return (ids, rows) if bool((num_columns == rows.shape[1]).all()) else None


def _changed_rows(new: LazyTensor, old: LazyTensor) -> tuple[Tensor, Tensor]:
    """Return the rows that differ in any bit; both tables are read in blocks of 64 MiB."""
    ids, rows = [torch.empty(0, dtype=torch.long)], [torch.empty((0, *new.shape[1:]), dtype=new.dtype)]
    for first, count in row_ranges(new.shape, new.dtype.itemsize):
        one, other = (_block(lazy, first, count) for lazy in (new, old))
        changed = (one.view(torch.uint8) != other.view(torch.uint8)).any(1).nonzero().squeeze(1)
        ids.append(changed + first)
        rows.append(one[changed])
    return torch.cat(ids), torch.cat(rows)


def _block(lazy: LazyTensor, first: int, count: int) -> Tensor:
    block = torch.empty((count, *lazy.shape[1:]), dtype=lazy.dtype)
    lazy.read_into([Chunk((first, *[0] * (len(lazy.shape) - 1)), block)])
    return block


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
