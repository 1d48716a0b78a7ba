"""Which rows of a sharded table changed since the last publication, and what they are."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_distrec.checkpoint.lazy_tensors import as_lazy
from lightning_distrec.chunks import Chunk, ChunkedTensor
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.sharding.mapping.id_mapping import IdMapping, mixed, unmixed
from lightning_distrec.sharding.mapping.state import keys_of_mapping
from lightning_distrec.sharding.scores.rank_group import RankGroup
from lightning_distrec.sharding.tables import Table
from lightning_distrec.strategies.checkpoints.changed_tables import ChangedTables

BLOCK_ROWS = 2**16
"""Rows that are read, exchanged and written at a time."""
NO_ROWS = torch.empty(0, dtype=torch.long)


class Rows(NamedTuple):
    """Rows of a table, a block of them, on the host."""

    numbers: Tensor
    """(num_rows,)."""
    values: Tensor
    """(num_rows, dim)."""
    ids: Any
    """Raw ids, an Arrow array with nulls for rows without; None: they are the rows' numbers."""

    def table(self) -> Any:
        """Return the rows as an Arrow table."""
        import pyarrow

        columns = {"row": pyarrow.array(self.numbers.numpy())}
        if self.ids is not None:
            columns["id"] = self.ids
        flat = pyarrow.array(self.values.contiguous().view(-1).numpy())
        width = self.values.shape[1]
        columns["values"] = pyarrow.FixedSizeListArray.from_arrays(flat, width)
        return pyarrow.table(columns)


class PublishedTable:
    """A table, of which this rank publishes its rows: those of its shards.

    A replicated table's rows are divided among the ranks, and compared with those that were
    published last. Of a table that is sharded by columns, ranks send each other the columns of rows
    that they divide among them. raw_ids: an Arrow array, the raw id of each row, with nulls; None:
    the mapping's, or there are none.
    """

    def __init__(
        self, table: Table, changed: ChangedTables, raw_ids: Any, ranks: Consensus
    ) -> None:
        tables = changed.tables.shards
        shards = tables.shards[table.full_name]
        self.name = table.full_name
        self.shape = (table.config.num_embeddings, table.config.embedding_dim)
        self._changed = changed
        self._raw_ids = raw_ids
        self._ranks = ranks
        self._group = RankGroup(ranks.rank, ranks.num_ranks, ranks.group)
        self._mapping: Any = tables.mappings.get(self.name)
        self._is_replicated = shards[0].replicated
        self._dtype = shards[0].values.dtype
        self._shards = [shard for shard in shards if shard.values.numel()]
        is_narrow = any(shard.values.shape[1] < self.shape[1] for shard in self._shards)
        self._is_by_columns = any(ranks.all_gather(is_narrow))
        self._pending = NO_ROWS
        """Rows that changed before this rank began to follow, or in a publication that failed;
        ascending."""
        self._in_flight = NO_ROWS
        self._last_values: Tensor | None = None
        self._next_values: Tensor | None = None
        """This rank's share of a replicated table, as published last, and as it is published; None:
        it is not known."""
        self._last_ids: Tensor | None = None
        self._next_ids: Tensor | None = None
        """The same of what the mapping has for each of this rank's rows, (num_rows, 1)."""

    @property
    def id_kind(self) -> str:
        """What raw ids are: values of a vocabulary, dynamic ids, or numbers of rows."""
        if self._raw_ids is not None:
            return "vocabulary"
        return "row" if self._mapping is None else "dynamic"

    def mapping_facts(self, root: Any) -> dict[str, Any] | None:
        """Return what a manifest says of the mapping: its names in the module's state."""
        if self._mapping is None:
            return None
        keys = keys_of_mapping(root, self._mapping)
        facts = {"no_id": self._mapping.no_id, "is_mixed": self._is_mixed}
        return {**keys, **facts}

    @property
    def _is_mixed(self) -> bool:
        return isinstance(self._mapping, IdMapping) and self._mapping.changes_ids

    def changed_rows(self, in_full: bool) -> Tensor:
        """Collective. Return the rows that may have changed since the last publication, ascending:
        this rank's; by columns, those of all ranks. in_full: whether they are all rows."""
        if self._is_replicated:
            rows = self._own_rows()
            if self._last_values is not None:
                rows = rows[(self._read(rows) != self._last_values).any(1)]
            return rows
        parts = [self._pending]
        for shard in self._shards:
            local = torch.arange(len(shard.values)) if in_full else self._changed.ids_of(shard)
            parts.append(local.cpu() + shard.row)
        if self._mapping is not None and self._last_ids is not None:
            (local, _) = (self._mapping.ids != self._last_ids).nonzero(as_tuple=True)
            parts.append(local.cpu() + self._mapping.first_row)
        parts = [part for part in parts if len(part)]
        if self._is_by_columns:
            parts = self._ranks.all_gather(torch.cat([NO_ROWS, *parts]))
        # Pending ones, and those of one shard, are ascending.
        return parts[0] if len(parts) == 1 else torch.cat([NO_ROWS, *parts]).unique()

    def all_rows(self) -> Tensor:
        """Return all rows as `changed_rows` does."""
        if self._is_by_columns:
            return torch.arange(self.shape[0])
        if self._is_replicated:
            return self._own_rows()
        ranges = [torch.arange(len(shard.values)) + shard.row for shard in self._shards]
        return torch.cat([NO_ROWS, *ranges]).sort().values

    def _own_rows(self) -> Tensor:
        """Return this rank's share of the rows."""
        shares = torch.arange(self.shape[0]).tensor_split(self._ranks.num_ranks)
        return shares[self._ranks.rank]

    def blocks(self, numbers: Tensor) -> Iterator[Rows]:
        """Collective by columns. Yield rows by their numbers; by columns, this rank's share of
        each block."""
        for part in numbers.split(BLOCK_ROWS):
            values = self._read(part)
            if self._is_by_columns:
                shares = part.tensor_split(self._ranks.num_ranks)
                # Each value is of one rank, and 0 on the others.
                values = self._group.send_rows(values, [*map(len, shares)]).sum(0)
                part = shares[self._ranks.rank]
            yield Rows(part, values.to(self._dtype), self._ids_of(part))

    def _read(self, numbers: Tensor) -> Tensor:
        """Return what this rank has of rows, and 0 elsewhere. numbers: ascending."""
        rows = torch.zeros(len(numbers), self.shape[1], dtype=self._dtype)
        for shard in self._shards:
            num_rows, num_columns = shard.values.shape
            bounds = torch.tensor([shard.row, shard.row + num_rows])
            begin, end = torch.searchsorted(numbers, bounds).tolist()
            local = (numbers[begin:end] - shard.row).to(shard.values.device)
            values = shard.values.detach().index_select(0, local)
            rows[begin:end, shard.column : shard.column + num_columns] = values.cpu()
        return rows

    def _ids_of(self, numbers: Tensor) -> Any:
        import pyarrow

        if self._raw_ids is not None:
            return self._raw_ids.take(pyarrow.array(numbers.numpy()))
        if self._mapping is None:
            return None
        ids = self._mapping.ids.view(-1).cpu()[numbers - self._mapping.first_row]
        return self._raw(ids)

    def _raw(self, ids: Tensor) -> Any:
        """Return raw ids, an Arrow array, of what the mapping has; null for none."""
        import pyarrow

        raw = unmixed(ids) if self._is_mixed else ids
        return pyarrow.array(raw.numpy(), mask=(ids == self._mapping.no_id).numpy())

    def deleted_ids(self) -> list[Any]:
        """Return an Arrow table of the raw ids that had rows when the last publication was made,
        and have none now; none where there is no mapping."""
        import pyarrow

        if self._mapping is None or self._last_ids is None:
            return []
        ids = self._mapping.ids
        lost = self._last_ids[(self._last_ids != ids) & (self._last_ids != self._mapping.no_id)]
        return [pyarrow.table({"id": self._raw(lost[~torch.isin(lost, ids)].cpu())})]

    def begin(self, numbers: Tensor) -> None:
        """Rows are about to be published, as they are now."""
        self._in_flight = numbers
        if self._is_replicated:
            self._next_values = self._read(self._own_rows())
        if self._mapping is not None:
            self._next_ids = self._mapping.ids.clone()

    def end(self, is_published: bool) -> None:
        """The publication that was begun exists now, or it failed."""
        if is_published:
            self._pending = NO_ROWS
            self._last_values = self._next_values
            self._last_ids = self._next_ids
        else:
            self._pending = torch.cat([self._pending, self._in_flight]).unique()
        self._in_flight = NO_ROWS

    def state(self, in_full: bool) -> dict[str, ChunkedTensor]:
        """Return what a checkpoint keeps: which rows changed since the last publication, and what
        the mapping had for each row then."""
        flags = ChunkedTensor((self.shape[0], 1), torch.uint8, [])
        for shard in self._shards if not self._is_replicated else ():
            if shard.column:
                continue
            num_rows = len(shard.values)
            chunk = torch.full((num_rows, 1), int(in_full), dtype=torch.uint8)
            if not in_full:
                chunk[self._changed.ids_of(shard).cpu()] = 1
            local = self._pending - shard.row
            chunk[local[(local >= 0) & (local < num_rows)]] = 1
            flags.chunks.append(Chunk((shard.row, 0), chunk))
        state = {}
        if not self._is_replicated:
            state["changed"] = flags
        if self._last_ids is not None:
            chunks = [Chunk((self._mapping.first_row, 0), self._last_ids.cpu())]
            state["ids"] = ChunkedTensor((self.shape[0], 1), torch.int64, chunks)
        return state

    def load(self, state: Mapping[str, Any], was_written: bool) -> bool:
        """Go on from a checkpoint's `state`; return whether it is of a table of this size.

        was_written: whether rows were written since the checkpoint was loaded.
        """
        lazy: Any
        pending = [NO_ROWS]
        # A table that every rank had is compared with what was published, which is not known now.
        if was_written or "changed" not in state:
            pending.append(self.all_rows())
        for name, value in state.items():
            lazy = as_lazy(value)
            if tuple(lazy.shape) != (self.shape[0], 1):
                return False
            if name == "ids" and self._mapping is not None:
                ids = torch.empty(self._mapping.ids.shape, dtype=torch.int64)
                lazy.read_into([Chunk((self._mapping.first_row, 0), ids)])
                self._last_ids = ids.to(self._mapping.ids.device)
            for shard in self._shards if name == "changed" else ():
                flags = torch.zeros(len(shard.values), 1, dtype=torch.uint8)
                lazy.read_into([Chunk((shard.row, 0), flags)])
                pending.append(flags.view(-1).nonzero().view(-1) + shard.row)
        self._pending = torch.cat(pending).unique()
        return True

    def add_published(self, blocks: Iterable[tuple[Tensor, Tensor, Any]]) -> None:
        """Publish rows again that were published after the checkpoint. blocks: as
        `Publications.rows` yields them."""
        for numbers, _, ids in blocks:
            is_here = torch.zeros(len(numbers), dtype=torch.bool)
            for shard in self._shards:
                last = shard.row + len(shard.values)
                is_here |= (numbers >= shard.row) & (numbers < last)
            self._pending = torch.cat([self._pending, numbers[is_here]]).unique()
            if self._last_ids is not None:
                no_id = self._mapping.no_id
                raw = torch.from_numpy(ids.fill_null(no_id).to_numpy().copy())[is_here]
                stored = torch.where(raw == no_id, raw, mixed(raw)) if self._is_mixed else raw
                local = numbers[is_here] - self._mapping.first_row
                self._last_ids[local, 0] = stored.to(self._last_ids.device)
