"""Saves a series of checkpoints while a fit trains: a full one, then differences to it, then the
next full one."""

from __future__ import annotations

import secrets
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
from lightning_distrec.chunks import Chunk, ChunkedTensor
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import CheckpointError, ConfigError
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
        """Return where it lies in a tensor along the table: of elements, of one column, or of one
        number per row."""
        if len(shape) == 1:
            return (self.row,), (self.num_rows,)
        if shape[1] == dim:
            return (self.row, self.column), (self.num_rows, self.num_columns)
        return (self.row, 0), (self.num_rows, 1)


@dataclass(frozen=True)
class TensorOfTable:
    """A sharded tensor in a checkpoint that lies along a table: the dict that holds it, and its key
    there."""

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
    """Return the sharded tensors of a checkpoint that lie along tables, weights and state; the same
    on every rank."""
    keys = tables.shards.keys_in_tree() | {
        table.key: table.full_name for table in tables.shards.tables
    }
    state = checkpoint["state_dict"]
    tensors = [
        TensorOfTable(f"state_dict/{key}", keys[key], state, key) for key in state if key in keys
    ]
    for i, optimizer in enumerate(checkpoint.get("optimizer_states", [])):
        for name, values in optimizer.get("state", {}).items():
            path = f"optimizer_states/{i}/state/{name}"
            tensors += [
                TensorOfTable(f"{path}/{key}", keys[name], values, key)
                for key in values
                if name in keys
            ]
    return [tensor for tensor in tensors if isinstance(tensor.tensor, ChunkedTensor)]


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
    tables = changed.tables
    tensors = [
        t
        for t in find_table_tensors(checkpoint, tables)
        if t.path in in_base and t.table not in in_full
    ]
    names = {tensor.table for tensor in tensors}
    shards = {name: [s for s in tables.shards.shards[name] if s.values.numel()] for name in names}
    ids = {name: [changed.ids_of(shard) for shard in shards[name]] for name in names}
    local_places = {
        name: [
            ShardPlace(
                shard.row, shard.column, len(shard.values), shard.values.shape[1], len(changed_ids)
            )
            for shard, changed_ids in zip(shards[name], ids[name], strict=True)
        ]
        for name in names
    }
    dims = {table.full_name: table.config.embedding_dim for table in tables.shards.tables}
    with without_torch_function():
        # EMAWeightAveraging puts averages in the place of rows: those have other memory, and stay
        # in full.
        memory = {tensor.data_ptr() for name in names for tensor in changed.table_memory(name)}
    chunks = {
        t.path: _chunks(t.tensor, local_places[t.table], dims[t.table], memory) for t in tensors
    }
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
        name: sum(
            place.num_changed
            for places in per_rank_places
            for place in places[name]
            if not place.column
        )
        for name in names
    }
    # Rows and their numbers take more bytes than the table once most of it has changed.
    num_rows = {name: count for name, count in num_rows.items() if count < WORTH * sizes[name]}
    row_ids: dict[str, ChunkedTensor] = {}
    saved_by_rows = set()
    for tensor in tensors:
        if tensor.table not in num_rows or not all(
            rank_has_chunks[tensor.path] for _, rank_has_chunks in per_rank
        ):
            continue
        shape, dtype = tuple(tensor.tensor.shape), tensor.tensor.dtype
        # Half the bytes, for all tables but the very largest.
        id_type = torch.int32 if sizes[tensor.table] < 2**31 else torch.int64
        entries = []
        for rank, places in enumerate(per_rank_places):
            for i, place in enumerate(places[tensor.table]):
                if not place.num_changed:
                    continue
                # All ranks make entries for the rows of every rank, because they must write equal
                # names.
                local_ids = ids[tensor.table][i] if rank == ranks.rank else None
                rows = (
                    None
                    if local_ids is None
                    else (chunks[tensor.path] or [])[i].index_select(0, local_ids)
                )
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


def _on_one_rank(
    shape: tuple[int, ...], dtype: torch.dtype, tensor: Tensor | None
) -> ChunkedTensor:
    """Return a tensor that one rank has; None: another one."""
    return ChunkedTensor(shape, dtype, [] if tensor is None else [Chunk((0,) * len(shape), tensor)])


def _chunks(
    tensor: ChunkedTensor, places: list[ShardPlace], dim: int, memory: set[int]
) -> list[Tensor] | None:
    """Return this rank's chunk of each place; None where one is a copy or an average of the
    table."""
    tensors = {chunk.box: chunk.tensor for chunk in tensor.chunks}
    candidates = [tensors.get(place.locate(tuple(tensor.shape), dim)) for place in places]
    chunks = [chunk for chunk in candidates if chunk is not None and chunk.data_ptr() in memory]
    return chunks if len(chunks) == len(places) else None


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
                "checkpoint: incremental saves changed rows of sharded tables, and "
                "this module has none."
            )
        self._options, self._ranks, self._tables, self._remove = options, ranks, tables, remove
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
        step, last, every = trainer.global_step, self._last_step, self._options.every
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
            written, self._writing = self._writing, None
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
                "checkpoint: incremental: a full checkpoint is saved, since all tables "
                "are saved in full."
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
    needed = (
        {base}
        | {path.name for _, path, _ in newest[:keep]}
        | {mark.base_name for _, _, mark in newest[:keep]}
    )
    old = [(path, mark) for _, path, mark in newest if path.name not in needed]
    # If the process dies in between, no difference has lost its base.
    return [path for path, _ in sorted(old, key=lambda entry: not entry[1].is_difference)]
