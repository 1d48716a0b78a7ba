"""Saves a series of checkpoints while a fit trains: a full one, then differences to it, then the next full one."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_distrec.checkpoint.atomic_folder import MARKER, read_marker
from lightning_distrec.checkpoint.checkpoint_options import IncrementalOptions
from lightning_distrec.checkpoint.difference import INCREMENTAL, Mark, read_mark
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import CheckpointError, ConfigError
from lightning_distrec.strategies.checkpoints.changed_tables import ChangedTables
from lightning_distrec.strategies.checkpoints.table_differences import find_table_tensors, turn_into_difference
from lightning_distrec.strategies.checkpoints.table_states import SavedTables

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

    job: the label of the fit, which a restarted job keeps; "" for none. remove: removes a checkpoint, on rank 0, once
    those in flight are complete. Raises ConfigError on every rank: there are no tables.
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
            raise ConfigError("checkpoint: incremental saves changed rows of sharded tables, and this module has none.")
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
        # At the end, behind ModelCheckpoints, which Lightning has moved there when the Trainer was made.
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
        """Collective. Save the next checkpoint of the series. Raises CheckpointError on every rank."""
        self._in_full = self._tables_in_full(step)
        kind = "full" if self._in_full is None else "difference"
        self._writing = self._folder / f"step={step}-{kind}.ckpt"
        try:
            # By way of Lightning, which calls the hooks for saving; Checkpointing.save then calls `take`.
            self._trainer.save_checkpoint(self._writing, weights_only=False)
        finally:
            written, self._writing = self._writing, None
        # Only if saving did not raise: differences must not name a base that is not there.
        self._base = self._next_base
        if self._ranks.rank == 0:
            self._remove_old(written)

    def _tables_in_full(self, step: int) -> dict[str, str] | None:
        """Collective. Return the tables that a difference has in full, and why; None: a full checkpoint is due."""
        # A rank without rows of a table sees no writes into it: a reason on one rank is one for all.
        per_rank_reasons = self._ranks.all_gather(self._changed.in_full())
        in_full = {name: reason for reasons in per_rank_reasons for name, reason in reasons.items()}
        for name, reason in in_full.items():
            if name not in self._reported and self._base is not None:
                self._reported.add(name)
                rank_zero_info(f"checkpoint: incremental: table '{name}' is saved in full, because {reason}.")
        every = self._options.full_every
        # By quotients: with several optimizers global_step jumps over multiples.
        if self._base is None or step // every > self._base.step // every:
            return None
        if len(in_full) < len(self._tables.shards.tables):
            return in_full
        if "" not in self._reported:
            self._reported.add("")
            rank_zero_info("checkpoint: incremental: a full checkpoint is saved, since all tables are saved in full.")
        return None

    def take(self, checkpoint: dict[str, Any], path: str) -> dict[str, Any]:
        """Collective if `path` is the next of the series: turn it into what is saved; return its marker's entries."""
        # ModelCheckpoint's checkpoints come this way, too, and stay as they are.
        if self._writing is None or path != str(self._writing):
            return {}
        drawn: str = self._ranks.all_gather(secrets.token_hex(8))[0]
        if self._in_full is None:
            self._base = None  # should this one fail, there is none, since what changed before is forgotten
            self._changed.begin()
            mark = Mark(id=drawn, series=self._series, changed={})
            tensors = {tensor.path for tensor in find_table_tensors(checkpoint, self._tables)}
            self._next_base = _Base(drawn, self._writing.name, self._trainer.global_step, tensors)
        else:
            base = self._base
            assert base is not None
            rows = turn_into_difference(checkpoint, self._changed, self._in_full, base.tensors, self._ranks)
            mark = Mark(id=drawn, series=self._series, base_name=base.name, base_id=base.id, changed=rows)
        return {INCREMENTAL: asdict(mark)}

    def _remove_old(self, written: Path) -> None:
        """Remove, on rank 0, what is neither among the newest of the series nor needed by them. written: the newest."""
        stored = []
        for path in self._folder.glob("[!.]*.ckpt"):
            with suppress(CheckpointError, OSError):  # damaged, or not complete: it is not known to be of this series
                mark = read_mark(path, read_marker(path))
                if path != written and mark is not None and mark.series == self._series:
                    stored.append(((path / MARKER).stat().st_mtime_ns, path, mark))
        # `written` is the newest to keep, and not in the list, since it may be incomplete: hence keep - 1.
        for path in no_longer_needed(stored, self._options.keep - 1, self._base.name if self._base else ""):
            self._remove(path)


def no_longer_needed(stored: list[tuple[int, Path, Mark]], keep: int, base: str) -> list[Path]:
    """Return what to remove of a series, differences before their bases; `base` and the `keep` newest stay."""
    newest = sorted(stored, key=lambda entry: entry[0], reverse=True)
    needed = {base} | {path.name for _, path, _ in newest[:keep]} | {mark.base_name for _, _, mark in newest[:keep]}
    old = [(path, mark) for _, path, mark in newest if path.name not in needed]
    # If the process dies in between, no difference has lost its base.
    return [path for path, _ in sorted(old, key=lambda entry: not entry[1].is_difference)]
