"""Turns a checkpoint into a difference: of tables that changed in some rows, those rows and their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_distrec._compat.torch import without_torch_function
from lightning_distrec.checkpoint.difference import CHANGED, ROW_IDS
from lightning_distrec.chunks import Chunk, ChunkedTensor
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.strategies.checkpoints.changed_tables import ChangedTables
from lightning_distrec.strategies.checkpoints.table_states import SavedTables

WORTH = 0.8
"""Share of a table's rows from which on it is written in full."""


class ShardPlace(NamedTuple):
    """A shard of a table on some rank, with the number of its rows that have changed."""

    row: int
    column: int
    num_rows: int
    num_columns: int
    num_changed: int

    def locate(self, shape: tuple[int, ...], dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return where it lies in a tensor along the table: of elements, of one column, or of one number per row."""
        if len(shape) == 1:
            return (self.row,), (self.num_rows,)
        if shape[1] == dim:
            return (self.row, self.column), (self.num_rows, self.num_columns)
        return (self.row, 0), (self.num_rows, 1)


@dataclass(frozen=True)
class TensorOfTable:
    """A sharded tensor in a checkpoint that lies along a table: the dict that holds it, and its key there."""

    path: str
    table: str
    holder: dict[str, Any]
    key: str

    @property
    def tensor(self) -> ChunkedTensor:
        """The tensor, of which this rank has its chunks."""
        tensor: ChunkedTensor = self.holder[self.key]
        return tensor


def find_table_tensors(checkpoint: Mapping[str, Any], tables: SavedTables) -> list[TensorOfTable]:
    """Return the sharded tensors of a checkpoint that lie along tables, weights and state; the same on every rank."""
    keys = tables.shards.keys_in_tree() | {table.key: table.full_name for table in tables.shards.tables}
    state = checkpoint["state_dict"]
    tensors = [TensorOfTable(f"state_dict/{key}", keys[key], state, key) for key in state if key in keys]
    for i, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
        for name, values in optimizer.get("state", {}).items():
            path = f"optimizer_states/{i}/state/{name}"
            tensors += [TensorOfTable(f"{path}/{key}", keys[name], values, key) for key in values if name in keys]
    return [tensor for tensor in tensors if isinstance(tensor.tensor, ChunkedTensor)]


def turn_into_difference(
    checkpoint: dict[str, Any], changed: ChangedTables, in_full: Mapping[str, str], in_base: set[str], ranks: Consensus
) -> dict[str, int]:
    """Collective. Put changed rows in the place of tensors of tables, in place; return the number of rows by table.

    in_full: tables that stay as they are, the same on every rank. in_base: the tensors of tables that the base has.
    """
    tables = changed.tables
    tensors = [t for t in find_table_tensors(checkpoint, tables) if t.path in in_base and t.table not in in_full]
    names = {tensor.table for tensor in tensors}
    shards = {name: [s for s in tables.shards.shards[name] if s.weight.numel()] for name in names}
    ids = {name: [changed.ids_of(shard) for shard in shards[name]] for name in names}
    local_places = {
        name: [
            ShardPlace(shard.row, shard.column, shard.weight.shape[0], shard.weight.shape[1], len(changed_ids))
            for shard, changed_ids in zip(shards[name], ids[name], strict=True)
        ]
        for name in names
    }
    dims = {table.full_name: table.config.embedding_dim for table in tables.shards.tables}
    with without_torch_function():
        # EMAWeightAveraging puts averages in the place of rows: those have other memory, and stay in full.
        memory = {tensor.data_ptr() for name in names for tensor in changed.table_memory(name)}
    chunks = {t.path: _chunks(t.tensor, local_places[t.table], dims[t.table], memory) for t in tensors}
    has_chunks = {path: tensor_chunks is not None for path, tensor_chunks in chunks.items()}
    # What follows depends on gathered values only, so that all ranks write the same names.
    per_rank = ranks.all_gather((local_places, has_chunks))
    per_rank_places = [
        {name: [ShardPlace(*place) for place in places] for name, places in rank_places.items()}
        for rank_places, _ in per_rank
    ]
    sizes = {table.full_name: table.config.num_embeddings for table in tables.shards.tables}
    num_rows = {
        # Shards side by side have the same changed rows: those at column 0 count each row once.
        name: sum(place.num_changed for places in per_rank_places for place in places[name] if not place.column)
        for name in names
    }
    # Rows and their numbers take more bytes than the table once most of it has changed.
    num_rows = {name: count for name, count in num_rows.items() if count < WORTH * sizes[name]}
    row_ids: dict[str, ChunkedTensor] = {}
    saved_by_rows = set()
    for tensor in tensors:
        if tensor.table not in num_rows or not all(rank_has_chunks[tensor.path] for _, rank_has_chunks in per_rank):
            continue
        shape, dtype = tuple(tensor.tensor.shape), tensor.tensor.dtype
        # Half the bytes, for all tables but the very largest.
        id_type = torch.int32 if sizes[tensor.table] < 2**31 else torch.int64
        entries = []
        for rank, places in enumerate(per_rank_places):
            for i, place in enumerate(places[tensor.table]):
                if not place.num_changed:
                    continue
                # All ranks make entries for the rows of every rank, because they must write equal names.
                local_ids = ids[tensor.table][i] if rank == ranks.rank else None
                rows = None if local_ids is None else (chunks[tensor.path] or [])[i].index_select(0, local_ids)
                name, count = f"{tensor.table}@{place.row},{place.column}", place.num_changed
                # Weights and optimizer state of a shard share the numbers of their rows.
                if name not in row_ids:
                    table_ids = None if local_ids is None else (local_ids + place.row).to(id_type)
                    row_ids[name] = _on_one_rank((count,), id_type, table_ids)
                offsets, box = place.locate(shape, dims[tensor.table])
                values = _on_one_rank((count, *box[1:]), dtype, rows)
                entries.append({"offsets": offsets, "sizes": box, "ids": name, "rows": values})
        tensor.holder[tensor.key] = {CHANGED: entries, "shape": shape}
        saved_by_rows.add(tensor.table)
    checkpoint[ROW_IDS] = row_ids
    return {name: count for name, count in num_rows.items() if name in saved_by_rows}


def _on_one_rank(shape: tuple[int, ...], dtype: torch.dtype, tensor: Tensor | None) -> ChunkedTensor:
    """Return a tensor that one rank has; None: another one."""
    return ChunkedTensor(shape, dtype, [] if tensor is None else [Chunk((0,) * len(shape), tensor)])


def _chunks(tensor: ChunkedTensor, places: list[ShardPlace], dim: int, memory: set[int]) -> list[Tensor] | None:
    """Return this rank's chunk of each place; None where one is a copy or an average of the table."""
    tensors = {chunk.box: chunk.tensor for chunk in tensor.chunks}
    candidates = [tensors.get(place.locate(tuple(tensor.shape), dim)) for place in places]
    chunks = [chunk for chunk in candidates if chunk is not None and chunk.data_ptr() in memory]
    return chunks if len(chunks) == len(places) else None
