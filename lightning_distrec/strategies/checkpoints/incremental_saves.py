"""Saves a series of checkpoints while a fit trains: a full one, then differences to it, then the
next full one."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from typing_extensions import override

from lightning_distrec._compat.torch import without_torch_function
from lightning_distrec.checkpoint.atomic_folder import MARKER, read_marker
from lightning_distrec.checkpoint.checkpoint_options import IncrementalOptions
from lightning_distrec.checkpoint.difference import CHANGED, INCREMENTAL, ROW_IDS, Mark, read_mark
from lightning_distrec.chunks import Box, Chunk, ChunkedTensor
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import CheckpointError, ConfigError
from lightning_distrec.strategies.checkpoints.changed_tables import ChangedTables
from lightning_distrec.strategies.checkpoints.table_states import SavedTables, shard_box

WORTH = 0.8
"""Share of a table's rows from which on it is written in full."""


class TensorOfTable(NamedTuple):
    """A sharded tensor in a checkpoint that lies along a table: the dict that holds it, and its key
    there."""

    path: str
    table: str
    holder: dict[str, Any]
    key: str
    tensor: ChunkedTensor
    """Of which this rank has its chunks."""


def find_table_tensors(checkpoint: Mapping[str, Any], tables: SavedTables) -> list[TensorOfTable]:
    """Return the sharded tensors of a checkpoint that lie along tables, weights and state; the same
    on every rank."""
    names = tables.shards.keys_in_tree()
    names |= {table.key: table.full_name for table in tables.shards.tables}
    tensors = []
    state = checkpoint["state_dict"]
    for key, table in names.items():
        value = state.get(key)
        if isinstance(value, ChunkedTensor):
            tensors.append(TensorOfTable(f"state_dict/{key}", table, state, key, value))
    for i, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
        for weight, values in optimizer.get("state", {}).items():
            for key, value in values.items():
                if weight in names and isinstance(value, ChunkedTensor):
                    path = f"optimizer_states/{i}/state/{weight}/{key}"
                    tensors.append(TensorOfTable(path, names[weight], values, key, value))
    return tensors


class ShardRows(NamedTuple):
    """The changed rows of a shard on this rank, in a tensor along its table."""

    box: Box
    """Where the shard lies in the tensor."""
    name: str
    """Of the rows' numbers, which weights and optimizer state of a shard share."""
    ids: Tensor
    """Counted from the shard's first row."""
    chunk: Tensor
    """All rows of the shard."""


class ChangedRows:
    """The changed rows of a table on this rank."""

    def __init__(self, changed: ChangedTables, name: str) -> None:
        all_shards = changed.tables.shards
        (self._config,) = (t.config for t in all_shards.tables if t.full_name == name)
        self._shards = [shard for shard in all_shards.shards[name] if shard.values.numel()]
        self._ids = list(map(changed.ids_of, self._shards))
        with without_torch_function():
            self._memory = {tensor.data_ptr() for tensor in changed.table_memory(name)}
        self.num_rows = 0
        for shard, ids in zip(self._shards, self._ids, strict=True):
            # Shards side by side have the same changed rows: those at column 0 count each row once.
            self.num_rows += 0 if shard.column else len(ids)
        # Half the bytes, for all tables but the very largest.
        self.id_type = torch.int32 if self._config.num_embeddings < 2**31 else torch.int64

    def is_worth(self, num_rows: int) -> bool:
        """Whether this number of rows, with their numbers, takes fewer bytes than the table."""
        return num_rows < WORTH * self._config.num_embeddings

    def in_tensor(self, tensor: ChunkedTensor) -> list[ShardRows] | None:
        """Return the rows of a tensor along the table, by shard; None where it is a copy or an
        average of the table."""
        chunks = {chunk.box: chunk.tensor for chunk in tensor.chunks}
        found = []
        for shard, ids in zip(self._shards, self._ids, strict=True):
            box = shard_box(shard, tensor.shape, self._config.embedding_dim)
            chunk = chunks.get(box)
            # EMAWeightAveraging puts averages in the place of rows: those have other memory, and
            # stay in full.
            if chunk is None or chunk.data_ptr() not in self._memory:
                return None
            if len(ids):
                name = f"{shard.table}@{shard.row},{shard.column}"
                found.append(ShardRows(box, name, ids, chunk))
        return found


def turn_into_difference(
    checkpoint: dict[str, Any],
    changed: ChangedTables,
    in_full: Mapping[str, str],
    in_base: set[str],
    ranks: Consensus,
) -> dict[str, int]:
    """Collective. Put changed rows in the place of tensors of tables, in place; return the number
    of rows by table.

    in_full: tables that stay as they are, the same on every rank. in_base: the tensors of tables
    that the base has.
    """
    tensors = []
    tables: dict[str, ChangedRows] = {}
    for tensor in find_table_tensors(checkpoint, changed.tables):
        if tensor.path in in_base and tensor.table not in in_full:
            tensors.append(tensor)
            if tensor.table not in tables:
                tables[tensor.table] = ChangedRows(changed, tensor.table)
    local_rows = {t.path: tables[t.table].in_tensor(t.tensor) for t in tensors}
    local_facts = {}
    for path, shards in local_rows.items():
        if shards is not None:
            local_facts[path] = [(shard.box, shard.name, len(shard.ids)) for shard in shards]
    counts = {name: table.num_rows for name, table in tables.items()}
    # What follows depends on gathered values only, so that all ranks write the same names.
    per_rank = ranks.all_gather((counts, local_facts))
    num_rows: Counter[str] = Counter()
    for rank_counts, _ in per_rank:
        num_rows.update(rank_counts)
    row_ids: dict[str, ChunkedTensor] = {}
    by_rows = {}
    for tensor in tensors:
        count = num_rows[tensor.table]
        per_rank_facts = [facts.get(tensor.path) for _, facts in per_rank]
        if None in per_rank_facts or not tables[tensor.table].is_worth(count):
            continue
        entries = []
        id_type = tables[tensor.table].id_type
        for rank, facts in enumerate(per_rank_facts):
            local = local_rows[tensor.path] if rank == ranks.rank else None
            for i, ((offsets, sizes), name, num_ids) in enumerate(facts):
                ids = rows = None
                if local is not None:
                    ids = (local[i].ids + offsets[0]).to(id_type)
                    rows = local[i].chunk.index_select(0, local[i].ids)
                if name not in row_ids:
                    row_ids[name] = _on_one_rank((num_ids,), id_type, ids)
                values = _on_one_rank((num_ids, *sizes[1:]), tensor.tensor.dtype, rows)
                entries.append({"offsets": offsets, "sizes": sizes, "ids": name, "rows": values})
        tensor.holder[tensor.key] = {CHANGED: entries, "shape": tuple(tensor.tensor.shape)}
        by_rows[tensor.table] = count
    checkpoint[ROW_IDS] = row_ids
    return by_rows


def _on_one_rank(
    shape: tuple[int, ...], dtype: torch.dtype, tensor: Tensor | None
) -> ChunkedTensor:
    """Return a tensor that one rank has; None: another one."""
    chunks = [] if tensor is None else [Chunk((0,) * len(shape), tensor)]
    return ChunkedTensor(shape, dtype, chunks)


FOLDER = "incremental_checkpoints"
"""In default_root_dir, with a folder for each job."""


@dataclass(frozen=True)
class _Base:
    id: str
    name: str
    step: int
    tensors: set[str]
    """Its tensors that lie along tables."""


class IncrementalSaves(Callback):
    """The series of one fit, saved after every `every` optimizer steps.

    job: the label of the fit, which a restarted job keeps; "" for none. remove: removes a
    checkpoint, on rank 0, once those in flight are complete. Raises ConfigError on every rank:
    there are no tables.
    """

    def __init__(
        self,
        options: IncrementalOptions,
        ranks: Consensus,
        tables: SavedTables | None,
        trainer: Trainer,
        job: str,
        remove: Callable[[Path], None],
    ) -> None:
        if tables is None:
            raise ConfigError(
                "checkpoint: incremental saves changed rows of sharded tables, and this module has "
                "none."
            )
        self._options = options
        self._ranks = ranks
        self._tables = tables
        self._remove = remove
        self._trainer = trainer
        self._series: str = ranks.all_gather(job or f"fit-{secrets.token_hex(4)}")[0]
        folder = options.dirpath or Path(trainer.default_root_dir, FOLDER, self._series)
        self._folder = Path(ranks.all_gather(str(folder))[0]).absolute()
        self._changed = ChangedTables(tables, trainer.strategy.precision_plugin)
        self._base: _Base | None = None
        self._next_base: _Base | None = None
        self._writing: Path | None = None
        self._in_full: dict[str, str] | None = None
        self._reported: set[str] = set()
        self._last_step = 0
        # At the end, behind ModelCheckpoints, which Lightning has moved there when the Trainer was
        # made.
        trainer.callbacks.append(self)  # type: ignore[attr-defined]

    def release(self) -> None:
        """Stop saving, and following the tables; they are held no more."""
        self._changed.release()
        with suppress(ValueError):  # it was released before
            self._trainer.callbacks.remove(self)  # type: ignore[attr-defined]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_step = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        last = self._last_step
        every = self._options.every
        self._last_step = step
        # While gradients accumulate the step stays the same: it is saved once.
        if step // every > last // every:
            self.save(step)

    def save(self, step: int) -> None:
        """Collective. Save the next checkpoint of the series. Raises CheckpointError on every
        rank."""
        self._in_full = self._tables_in_full(step)
        kind = "full" if self._in_full is None else "difference"
        self._writing = self._folder / f"step={step}-{kind}.ckpt"
        try:
            # By way of Lightning, which calls the hooks for saving; Checkpointing.save then calls
            # `take`.
            self._trainer.save_checkpoint(self._writing, weights_only=False)
        finally:
            written = self._writing
            self._writing = None
        # Only if saving did not raise: differences must not name a base that is not there.
        self._base = self._next_base
        if self._ranks.rank == 0:
            self._remove_old(written)

    def _tables_in_full(self, step: int) -> dict[str, str] | None:
        """Collective. Return the tables that a difference has in full, and why; None: a full
        checkpoint is due."""
        # A rank without rows of a table sees no writes into it: a reason on one rank is one for
        # all.
        per_rank_reasons = self._ranks.all_gather(self._changed.in_full())
        in_full = {name: reason for reasons in per_rank_reasons for name, reason in reasons.items()}
        for name, reason in in_full.items():
            if name not in self._reported and self._base is not None:
                self._reported.add(name)
                rank_zero_info(
                    f"checkpoint: incremental: table '{name}' is saved in full, because {reason}."
                )
        every = self._options.full_every
        # By quotients: with several optimizers global_step jumps over multiples.
        if self._base is None or step // every > self._base.step // every:
            return None
        if len(in_full) < len(self._tables.shards.tables):
            return in_full
        if "" not in self._reported:
            self._reported.add("")
            rank_zero_info(
                "checkpoint: incremental: a full checkpoint is saved, since all tables are saved "
                "in full."
            )
        return None

    def take(self, checkpoint: dict[str, Any], path: str) -> dict[str, Any]:
        """Collective if `path` is the next of the series: turn it into what is saved; return its
        marker's entries."""
        # ModelCheckpoint's checkpoints come this way, too, and stay as they are.
        if self._writing is None or path != str(self._writing):
            return {}
        drawn: str = self._ranks.all_gather(secrets.token_hex(8))[0]
        if self._in_full is None:
            # should this one fail, there is none, since what changed before is forgotten
            self._base = None
            self._changed.begin()
            mark = Mark(id=drawn, series=self._series, changed={})
            tensors = {tensor.path for tensor in find_table_tensors(checkpoint, self._tables)}
            self._next_base = _Base(drawn, self._writing.name, self._trainer.global_step, tensors)
        else:
            base = self._base
            assert base is not None
            rows = turn_into_difference(
                checkpoint, self._changed, self._in_full, base.tensors, self._ranks
            )
            mark = Mark(
                id=drawn, series=self._series, base_name=base.name, base_id=base.id, changed=rows
            )
        return {INCREMENTAL: asdict(mark)}

    def _remove_old(self, written: Path) -> None:
        """Remove, on rank 0, what is neither among the newest of the series nor needed by them.
        written: the newest."""
        stored = []
        for path in self._folder.glob("[!.]*.ckpt"):
            # damaged, or not complete: it is not known to be of this series
            with suppress(CheckpointError, OSError):
                mark = read_mark(path, read_marker(path))
                if path != written and mark is not None and mark.series == self._series:
                    stored.append(((path / MARKER).stat().st_mtime_ns, path, mark))
        # `written` is the newest to keep, and not in the list, since it may be incomplete: hence
        # keep - 1.
        for path in no_longer_needed(
            stored, self._options.keep - 1, self._base.name if self._base else ""
        ):
            self._remove(path)


def no_longer_needed(stored: list[tuple[int, Path, Mark]], keep: int, base: str) -> list[Path]:
    """Return what to remove of a series, differences before their bases; `base` and the `keep`
    newest stay."""
    newest = sorted(stored, key=lambda entry: entry[0], reverse=True)
    needed = {base}
    for _, path, mark in newest[:keep]:
        needed |= {path.name, mark.base_name}
    differences: list[Path] = []
    full: list[Path] = []
    for _, path, mark in newest:
        if path.name not in needed:
            (differences if mark.is_difference else full).append(path)
    # If the process dies in between, no difference has lost its base.
    return differences + full
