"""Turns a checkpoint into a difference: of tables that changed in some rows, those rows and their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lightning_distrec._compat.torch import without_torch_function
from lightning_distrec.checkpoint.incremental.loading import CHANGED, ROW_IDS
from lightning_distrec.checkpoint.incremental.packed_rows import packed_width, quantized
from lightning_distrec.chunks import Chunk, ChunkedTensor
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.strategies.checkpoints.tables.changed_tables import ChangedTables
from lightning_distrec.strategies.checkpoints.tables.saved_tables import SavedTables

if TYPE_CHECKING:  # it loads torchrec, which modules without tables do not need
    from lightning_distrec.sharding.row_gradients import LocalShard

WEIGHTS = "state_dict/"
"""What the places of weights in a checkpoint begin with."""
WORTH = 0.8
"""Share of a table's rows from which on it is written in full."""


class ShardPlace(NamedTuple):
    """A shard of a table on some rank, with the number of its rows that have changed."""

    row: int
    column: int
    num_rows: int
    num_columns: int
    num_changed: int

    def box_in(self, shape: tuple[int, ...], dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return where it lies in a tensor along the table: of elements, of one column, or of one number per row."""
        if len(shape) == 1:
            return (self.row,), (self.num_rows,)
        if shape[1] == dim:
            return (self.row, self.column), (self.num_rows, self.num_columns)
        return (self.row, 0), (self.num_rows, 1)


@dataclass(frozen=True)
class TensorOfTable:
    """A sharded tensor in a checkpoint that lies along a table: the dict that holds it, and its key there."""

    where: str
    table: str
    holder: dict[str, Any]
    key: str

    @property
    def tensor(self) -> ChunkedTensor:
        """The tensor, of which this rank has its chunks."""
        tensor: ChunkedTensor = self.holder[self.key]
        return tensor


def tensors_of_tables(checkpoint: Mapping[str, Any], tables: SavedTables) -> list[TensorOfTable]:
    """Return the sharded tensors of a checkpoint that lie along tables, weights and state; the same on every rank."""
    keys = tables.shards.keys_in_tree() | {table.key: table.full_name for table in tables.shards.tables}
    state = checkpoint["state_dict"]
    found = [TensorOfTable(f"{WEIGHTS}{key}", keys[key], state, key) for key in state if key in keys]
    for i, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
        for name, values in optimizer.get("state", {}).items():
            where = f"optimizer_states/{i}/state/{name}"
            found += [TensorOfTable(f"{where}/{key}", keys[name], values, key) for key in values if name in keys]
    return [each for each in found if isinstance(each.tensor, ChunkedTensor)]


def as_difference(
    checkpoint: dict[str, Any],
    tables: SavedTables,
    changed: ChangedTables,
    in_full: Mapping[str, str],
    in_base: set[str],
    ranks: Consensus,
    row_bits: int = 32,
) -> dict[str, int]:
    """Collective. Put changed rows in the place of tensors of tables, in place; return the number of rows by table.

    in_full: tables that stay as they are, the same on every rank. in_base: the tensors of tables that the base has.
    row_bits: 8 packs the rows of float32 tables; their optimizer state stays as it is.
    """
    wanted = [t for t in tensors_of_tables(checkpoint, tables) if t.where in in_base and t.table not in in_full]
    shards = {name: [s for s in tables.shards.shards[name] if s.weight.numel()] for name in {t.table for t in wanted}}
    ids = {name: [changed.ids_of(shard) for shard in of_table] for name, of_table in shards.items()}
    mine = {name: _places(shards[name], ids[name]) for name in shards}
    dims = {table.full_name: table.config.embedding_dim for table in tables.shards.tables}
    with without_torch_function():
        memory = {tensor.data_ptr() for name in shards for tensor in changed.memory_of(name)}
    chunks = {t.where: _chunks(t.tensor, mine[t.table], dims[t.table], memory) for t in wanted}
    known = {where: of_tensor is not None for where, of_tensor in chunks.items()}
    of_ranks = [
        ({name: [ShardPlace(*place) for place in places] for name, places in of_rank.items()}, known_there)
        for of_rank, known_there in ranks.all_gather((mine, known))
    ]
    sizes = {t.full_name: t.config.num_embeddings for t in tables.shards.tables}
    num_rows = {
        name: sum(place.num_changed for of_rank, _ in of_ranks for place in of_rank[name] if not place.column)
        for name in shards
    }
    num_rows = {name: count for name, count in num_rows.items() if count < WORTH * sizes[name]}
    numbers: dict[str, ChunkedTensor] = {}
    by_rows = set()
    for each in wanted:
        if each.table not in num_rows or not all(known_there[each.where] for _, known_there in of_ranks):
            continue
        shape, dtype = tuple(each.tensor.shape), each.tensor.dtype
        places = []
        for rank, (of_rank, _) in enumerate(of_ranks):
            for i, place in enumerate(of_rank[each.table]):
                if not place.num_changed:
                    continue
                is_mine = rank == ranks.rank
                offsets, box = place.box_in(shape, dims[each.table])
                name = f"{each.table}@{place.row},{place.column}"
                count = place.num_changed
                own_ids = ids[each.table][i] if is_mine else None
                rows = (chunks[each.where] or [])[i].index_select(0, own_ids) if own_ids is not None else None
                if name not in numbers:
                    in_table = None if own_ids is None else (own_ids + place.row).to(_ids_type(sizes[each.table]))
                    numbers[name] = _alone((count,), _ids_type(sizes[each.table]), in_table)
                entry: dict[str, Any] = {"offsets": offsets, "sizes": box, "ids": name}
                if row_bits == 8 and each.where.startswith(WEIGHTS) and dtype == torch.float32 and not box[1] % 4:
                    packed = None if rows is None else quantized(rows, 8)
                    entry |= {"rows": _alone((count, packed_width(box[1], 8)), torch.uint8, packed), "bits": 8}
                else:
                    entry |= {"rows": _alone((count, *box[1:]), dtype, rows)}
                places.append(entry)
        each.holder[each.key] = {CHANGED: places, "shape": shape}
        by_rows.add(each.table)
    checkpoint[ROW_IDS] = numbers
    return {name: count for name, count in num_rows.items() if name in by_rows}


def _ids_type(num_rows: int) -> torch.dtype:
    return torch.int32 if num_rows < 2**31 else torch.int64


def _alone(shape: tuple[int, ...], dtype: torch.dtype, tensor: Tensor | None) -> ChunkedTensor:
    """Return a tensor that one rank has; None: another one."""
    return ChunkedTensor(shape, dtype, [] if tensor is None else [Chunk((0,) * len(shape), tensor)])


def _places(shards: list[LocalShard], ids: list[Tensor]) -> list[ShardPlace]:
    return [
        ShardPlace(shard.row, shard.column, shard.weight.shape[0], shard.weight.shape[1], len(changed))
        for shard, changed in zip(shards, ids, strict=True)
    ]


def _chunks(tensor: ChunkedTensor, places: list[ShardPlace], dim: int, memory: set[int]) -> list[Tensor] | None:
    """Return this rank's chunk of each place; None where one is a copy or an average of the table."""
    by_box = {chunk.box: chunk.tensor for chunk in tensor.chunks}
    found = [by_box.get(place.box_in(tuple(tensor.shape), dim)) for place in places]
    chunks = [chunk for chunk in found if chunk is not None and chunk.data_ptr() in memory]
    return chunks if len(chunks) == len(places) else None
