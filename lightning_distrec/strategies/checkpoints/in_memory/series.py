"""Which rows a copy has: all of them, or those that changed since the copy before, over which it is laid."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lightning.pytorch import Trainer

from lightning_distrec.checkpoint.incremental.marks import INCREMENTAL, Mark
from lightning_distrec.chunks import ChunkedTensor
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.strategies.checkpoints.tables.changed_tables import ChangedTables
from lightning_distrec.strategies.checkpoints.tables.difference import as_difference, tensors_of_tables
from lightning_distrec.strategies.checkpoints.tables.saved_tables import SavedTables

CHAIN = 0.5
"""Bytes of all differences that lie over a full copy, as a share of it; with more, the next copy is full."""
MAX_DIFFERENCES = 100
"""Each is a folder of its own, that a restart reads."""


class CopySeries:
    """A full copy, and differences each over the one before; then the next full copy. Of one fit, until `release`.

    tables: the module's. ranks: all.
    """

    def __init__(self, tables: SavedTables, trainer: Trainer, ranks: Consensus) -> None:
        self._tables, self._ranks = tables, ranks
        self._changed = ChangedTables(tables, trainer.strategy.precision_plugin)
        self._marks: list[tuple[str, Mark]] = []
        self._in_base: set[str] = set()
        self._full_bytes = self._chain_bytes = 0

    def release(self) -> None:
        """Stop following the tables; they are held no more."""
        self._changed.release()

    def take(self, checkpoint: dict[str, Any], name: str) -> tuple[list[str], dict[str, Any]]:
        """Collective. Turn a checkpoint into the next difference where one will do, in place.

        name: the copy's. Return the names of the copies that it lies over, and what its marker says of it.
        """
        changed = self._changed.in_full()
        of_ranks = self._ranks.all_gather((changed, self._is_long(checkpoint, changed), secrets.token_hex(8)))
        in_full = {table: why for of_rank, _, _ in of_ranks for table, why in of_rank.items()}
        drawn, over = of_ranks[0][2], [name for name, _ in self._marks]
        if any(is_long for _, is_long, _ in of_ranks) or len(in_full) == len(self._tables.shards.tables):
            over = []
            mark = Mark(id=drawn, series="", changed={})
            self._in_base = {each.where for each in tensors_of_tables(checkpoint, self._tables)}
            self._marks = []
        else:
            before, of_before = self._marks[-1]
            rows = as_difference(checkpoint, self._tables, self._changed, in_full, self._in_base, self._ranks)
            mark = Mark(id=drawn, series="", base_name=before, base_id=of_before.id, changed=rows)
        self._changed.begin()
        self._marks.append((name, mark))
        return over, {INCREMENTAL: asdict(mark)}

    def count(self, tensors: Mapping[str, ChunkedTensor]) -> None:
        """Note how much this rank writes of the copy that was taken last."""
        written = sum(chunk.tensor.nbytes for tensor in tensors.values() for chunk in tensor.chunks)
        if len(self._marks) == 1:
            self._full_bytes, self._chain_bytes = written, 0
        else:
            self._chain_bytes += written

    def _is_long(self, checkpoint: Mapping[str, Any], in_full: Mapping[str, str]) -> bool:
        """Whether there is no full copy, or this rank's differences would have too many bytes with the next one."""
        if not 0 < len(self._marks) <= MAX_DIFFERENCES:
            return True
        saved = 0.0
        shards = self._tables.shards.shards
        unchanged = {
            name: 1 - sum(len(self._changed.ids_of(s)) for s in of_table) / max(1, sum(len(s.weight) for s in of_table))
            for name, of_table in shards.items()
            if name not in in_full
        }
        for each in tensors_of_tables(checkpoint, self._tables):
            if each.where in self._in_base:
                held = sum(chunk.tensor.nbytes for chunk in each.tensor.chunks)
                saved += held * unchanged.get(each.table, 0.0)
        return self._chain_bytes + self._full_bytes - saved > CHAIN * self._full_bytes
