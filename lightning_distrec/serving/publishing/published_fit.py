"""The publications of one fit: what its ranks write, and what they agree on."""

from __future__ import annotations

import json
import secrets
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from safetensors.torch import save
from torch import Tensor

from lightning_distrec._compat.torch import versions_of, without_torch_function
from lightning_distrec.checkpoint.host_copies import gather_full
from lightning_distrec.errors import CheckpointError, ConfigError, did_you_mean
from lightning_distrec.serving.follow import PublicationError
from lightning_distrec.serving.publishing.publications import PublicationWriter
from lightning_distrec.serving.publishing.published_table import PublishedTable
from lightning_distrec.sharding.sharded_tables import sharded_tables_of
from lightning_distrec.strategies.checkpoints.changed_tables import ChangedTables

STATE = "published_rows"
"""Name of what a checkpoint has of it."""
WRITING_SECONDS = 600.0
"""How long training waits for a publication that is being written, until it has failed."""
LEAVING_SECONDS = 120.0
"""How long a run that has failed waits for a publication that is being written."""


class PublishedFit:
    """What one fit publishes, to a folder. Raises ConfigError on every rank: the fit has no sharded
    tables, or vocabularies are of no table or column."""

    def __init__(
        self,
        trainer: Trainer,
        writer: PublicationWriter,
        vocabularies: Mapping[str, str],
        full_every: int,
        keep: int,
    ) -> None:
        strategy: Any = trainer.strategy
        tables = getattr(strategy, "run_tables", None)  # TorchRecShardedStrategy's
        if tables is None:
            raise ConfigError(
                "PublishRows publishes rows of sharded tables, and this fit has none. Use "
                "strategy='torchrec_sharded', and save checkpoints of other modules."
            )
        if tables.shards.groups.num_replicas > 1:
            raise ConfigError(
                "PublishRows does not go together with sharding_groups, whose replicas differ "
                "between two synchronisations."
            )
        self.ranks = strategy.session.consensus
        self.last_step = 0
        """Of the newest publication, or of the checkpoint that the fit goes on from."""
        self._trainer = trainer
        self._writer = writer
        self._full_every = full_every
        self._keep = keep
        self._changed = ChangedTables(tables, strategy.precision_plugin)
        columns: Any = getattr(getattr(trainer, "datamodule", None), "columns", None)
        plain = columns.to_plain() if hasattr(columns, "to_plain") else None
        self._columns_crc32 = None
        if plain is not None:  # as an export writes it
            self._columns_crc32 = zlib.crc32((json.dumps(plain) + "\n").encode())
        raw_ids = _RawIds(vocabularies, {} if plain is None else plain["vocabularies"])
        self._keys: dict[str, list[str]] = {}
        for key, name in tables.shards.keys_in_tree().items():
            self._keys.setdefault(name, []).append(key)
        self._tables = {}
        for table in tables.shards.tables:
            name = table.full_name
            self._tables[name] = PublishedTable(
                table, self._changed, raw_ids.of_table(table), self.ranks
            )
        raw_ids.refuse_unused()
        self._mappings = {
            name: table.mapping_facts(trainer.lightning_module)
            for name, table in self._tables.items()
        }
        self.job = ""
        """Of all fits that publish one after the other to a folder."""
        self._run: str = self.ranks.all_gather(secrets.token_hex(8))[0]
        self._sequence = 0
        self._last_id: str | None = None
        """Of the newest publication."""
        self._dense_crc32 = 0
        self._start: dict[str, Any] | None = None
        self._needs_snapshot = True
        self._thread: threading.Thread | None = None
        """Writes a publication."""
        self._part = _Part("", writer)
        self._manifest: dict[str, Any] = {}
        self._begin_step = self._next_look = 0

    def begin(self, loaded: Mapping[str, Any], job: str | None, was_written: bool) -> None:
        """Collective. Go on with the folder's publications. loaded: what the checkpoint has of
        them, by job, and its step. job: of an earlier fit of this callback. was_written: whether
        something has written rows since then.

        Raises ConfigError on every rank: they are another job's, or the folder is not shared.
        """
        ranks = self.ranks
        job_fit = self._trainer.strategy.resuming.job  # type: ignore[attr-defined]
        self.job = job or self._run
        if job_fit.has_name:  # which it keeps over restarts, also before its first checkpoint
            folder = zlib.crc32(self._writer.folder.encode())
            self.job = f"{job_fit.name}-{folder:08x}"
        probe = f"probe-{self._run}"

        def open_on_rank_0() -> dict[str, Any]:
            return self._open(probe, loaded) if ranks.rank == 0 else {}

        newest = ranks.all_gather(ranks.all_or_none("PublishRows", open_on_rank_0))[0]
        ranks.all_or_none("PublishRows", lambda: self._check_seen(probe))
        if ranks.rank == 0:
            self._writer.remove(probe)
        self.job = newest["job"]
        self._sequence = newest["sequence"]
        if self.job in loaded:
            state = loaded[self.job]
            self.last_step = state["step"]
            self._sequence = max(self._sequence, state["sequence"])
            self._start = {"run": state["run"], "step": state["step"]}
            is_known = self._continue(state, newest, was_written)
            self._needs_snapshot = not ranks.all_reduce_min(int(is_known))
            self._last_id = newest["id"]

    def _open(self, probe: str, loaded: Mapping[str, Any]) -> dict[str, Any]:
        """Return the job, the number and the id of the newest publication, and write a file."""
        writer = self._writer
        jobs = {self.job, *loaded}
        manifest: dict[str, Any] = {"job": self.job, "sequence": 0, "id": None}
        if len(loaded) == 1:
            manifest["job"] = next(iter(loaded))
        try:
            sequences = writer.sequences()
            if sequences:
                manifest = writer.manifest(sequences[-1])
            writer.remove_unfinished()
            writer.write_bytes(probe, b"probe")
        except Exception as error:  # object stores raise errors of their own
            raise ConfigError(
                f"PublishRows: folder='{writer.folder}' cannot be used: {error}. Choose another."
            ) from error
        if manifest["job"] not in jobs:
            raise ConfigError(
                f"PublishRows: folder='{writer.folder}' has the publications of another job, "
                f"{manifest['job']}, until step {manifest['step']}. Choose an empty folder, or go "
                "on from a checkpoint of that job."
            )
        return {name: manifest[name] for name in ("job", "sequence", "id")}

    def _check_seen(self, probe: str) -> None:
        if not self._writer.exists(probe):
            raise ConfigError(
                f"PublishRows: folder='{self._writer.folder}': this rank does not see what rank 0 "
                "writes there. Choose a folder that all ranks share."
            )

    def _continue(
        self, state: Mapping[str, Any], newest: Mapping[str, Any], was_written: bool
    ) -> bool:
        """Go on where a checkpoint was; return whether it is known what changed since the newest
        publication."""
        if state["id"] is None or state["tables"].keys() != self._tables.keys():
            return False
        if state.get("columns") != self._columns_crc32:  # rows are of other values: see ColumnData
            return False
        for name, table in self._tables.items():
            if not table.load(state["tables"][name], was_written):
                return False
        last_id = newest["id"]
        later: list[dict[str, Any]] = []
        try:
            # From the newest one back to that of the checkpoint.
            for sequence in reversed(self._writer.sequences()):
                if last_id == state["id"]:
                    break
                manifest = self._writer.manifest(sequence)
                if manifest["id"] != last_id or manifest["base"] is None:
                    return False
                last_id = manifest["base"]
                later = [manifest, *later]
            for manifest in later:
                for name, table in self._tables.items():
                    for file in manifest["tables"][self._keys[name][0]]["changed"]:
                        table.add_published(self._writer.rows(file))
        except (OSError, PublicationError):
            return False
        return bool(last_id == state["id"])

    def state(self) -> dict[str, Any]:
        """Collective, without a publication in flight. Return what a checkpoint keeps: the same on
        every rank, and of tables this rank's part."""
        in_full = self._tables_in_full()
        last_id = None if self._needs_snapshot else self._last_id
        tables = {name: table.state(name in in_full) for name, table in self._tables.items()}
        return {
            **{"run": self._run, "sequence": self._sequence, "id": last_id, "tables": tables},
            "columns": self._columns_crc32,
        }

    @property
    def is_sharded(self) -> bool:
        """Whether the tables still are those of the fit."""
        tables = sharded_tables_of(self._trainer.lightning_module)
        return tables is self._changed.tables.shards

    def _tables_in_full(self) -> set[str]:
        """Collective. Return the tables of which all rows may have changed."""
        return set().union(*self.ranks.all_gather(set(self._changed.in_full())))

    def has_changes(self) -> bool:
        """Collective. Return whether anything may have changed since the last publication."""
        in_full = self._tables_in_full()
        rows = [table.changed_rows(name in in_full) for name, table in self._tables.items()]
        is_changed = any(map(len, rows)) or _crc32(self._dense_weights()) != self._dense_crc32
        return any(self.ranks.all_gather(is_changed))

    def publish(self, step: int) -> None:
        """Collective. Copy what is to be published, and write it in a thread; a snapshot is written
        at once."""
        ranks = self.ranks
        # A number is not used again: what has failed may still come into sight.
        self._sequence += 1
        sequence = self._sequence
        is_snapshot = self._needs_snapshot or sequence % self._full_every == 0
        in_full = self._tables_in_full()
        own_id: str = ranks.all_gather(secrets.token_hex(8))[0]
        folder = f"rows-{sequence:08d}-{own_id}"
        self._part = part = _Part(f"{folder}/{{}}.{ranks.rank}", self._writer)
        dense = self._dense_weights()
        self._dense_crc32 = _crc32(dense)
        later: list[tuple[str, str, Any]] = []
        for name, table in self._tables.items():
            numbers = table.changed_rows(name in in_full)
            if not self._needs_snapshot:
                later.append((name, "changed", [rows.table() for rows in table.blocks(numbers)]))
                later.append((name, "deleted", table.deleted_ids()))
            if is_snapshot:
                rows = table.all_rows()
                part.write(name, "snapshot", (rows.table() for rows in table.blocks(rows)))
            table.begin(numbers)
        self._changed.begin()
        self._manifest = {
            "sequence": sequence,
            "id": own_id,
            "base": None if self._needs_snapshot else self._last_id,
            "step": step,
            "job": self.job,
            "run": self._run,
            "start": self._start,
            "is_snapshot": is_snapshot,
            "columns": self._columns_crc32,
            "folder": folder,
        }
        self.last_step = step

        def write() -> None:
            for name, form, tables in later:
                part.write(name, form, tables)
            if ranks.rank == 0:
                part.write_dense(dense)

        self._thread = threading.Thread(target=write, name="publish", daemon=True)
        self._thread.start()
        self._begin_step = step
        self._next_look = step + 1

    def _dense_weights(self) -> dict[str, Tensor]:
        """Collective. Return the module's weights but tables and mappings, on rank 0."""
        state = self._trainer.strategy.lightning_module_state_dict()
        table_keys = {key for keys in self._keys.values() for key in keys}
        for mapping in filter(None, self._mappings.values()):
            table_keys |= {*mapping["names"]}
        dense = {name: value for name, value in state.items() if name not in table_keys}
        full = gather_full(dense, self.ranks)
        copies = {}
        for name, value in full.items() if self.ranks.rank == 0 else ():
            if isinstance(value, Tensor):  # else what a module adds to its state
                copies[name] = value.detach().cpu().clone().contiguous()
        return copies

    def look(self, step: int) -> None:
        """Collective now and then, at steps that all ranks know. Complete the publication in flight
        once all ranks have written their part."""
        if self._thread is not None and step >= self._next_look:
            self._next_look = step + 1 + (step - self._begin_step)
            if not any(self.ranks.all_gather(self._thread.is_alive())):
                self.finish()

    def finish(self) -> None:
        """Collective. Wait for the publication in flight. Raises CheckpointError on every rank: it
        failed; the next one has its rows."""
        if self._thread is None:
            return
        self._thread.join(WRITING_SECONDS)
        part = self._part
        if self._thread.is_alive():
            part.problem = f"writing takes more than {WRITING_SECONDS:.0f} s"
        self._thread = None
        parts = self.ranks.all_gather((part.problem, part.files))
        problem = ""
        for rank, (problem_of_rank, _) in enumerate(parts):
            if problem_of_rank:
                problem = f"rank {rank}: {problem_of_rank}"
        if not problem and self.ranks.rank == 0:
            problem = _problem_of(lambda: self._complete([files for _, files in parts]))
        problem = self.ranks.all_gather(problem)[0]
        for table in self._tables.values():
            table.end(is_published=not problem)
        if problem:
            if self.ranks.rank == 0:
                _problem_of(lambda: self._writer.remove(self._manifest["folder"]))
            raise CheckpointError(
                f"PublishRows: publication {self._sequence} of step {self.last_step} cannot be "
                f"written to {self._writer.folder}: {problem}. The earlier ones are unchanged."
            )
        self._last_id = self._manifest["id"]
        self._needs_snapshot = False
        if self.ranks.rank == 0:
            problem = _problem_of(lambda: self._writer.remove_older(self._keep))
            if problem:
                rank_zero_warn(f"PublishRows: old publications cannot be removed: {problem}.")

    def _complete(self, parts: list[dict[Any, Any]]) -> None:
        """Write the manifest."""
        tables: dict[str, Any] = {}
        for name, table in self._tables.items():
            key, *also = self._keys[name]
            num_rows, dim = table.shape
            tables[key] = {"num_rows": num_rows, "dim": dim, "id": table.id_kind, "also": also}
            tables[key]["mapping"] = self._mappings[name]
            for form in ("changed", "deleted", "snapshot"):
                tables[key][form] = [
                    part[name, form] for part in parts if part.get((name, form)) is not None
                ]
        manifest = {**self._manifest, "tables": tables, "dense": parts[0]["dense"]}
        try:
            self._writer.write_manifest(manifest)
        except Exception:
            # It may be there, though the answer was lost.
            if self._writer.manifest(manifest["sequence"])["id"] != manifest["id"]:
                raise

    def release(self) -> None:
        """Stop following the tables, and wait 120 s at most for what is being written; it is then
        left unfinished."""
        self._changed.release()
        if self._thread is not None:
            self._thread.join(LEAVING_SECONDS)


class _Part:
    """What this rank writes of a publication. names: of its files, with {} for what they hold."""

    def __init__(self, names: str, writer: PublicationWriter) -> None:
        self._names = names
        self._writer = writer
        self.files: dict[Any, Any] = {}
        """(table, form), or "dense" -> what the manifest says of the file; None: there is none."""
        self.problem = ""
        """Why a file could not be written."""

    def write(self, name: str, form: str, tables: Iterable[Any]) -> None:
        """Write Arrow tables as a file. All are taken, also after a failure: making one may be
        collective."""
        file = self._names.format(f"{name}.{form}") + ".parquet"
        self._try((name, form), lambda: self._writer.write_tables(file, tables))

    def write_dense(self, tensors: dict[str, Tensor]) -> None:
        """Write tensors as a file of safetensors."""
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        file = self._names.format("dense") + ".safetensors"

        def write() -> dict[str, Any]:
            return {**self._writer.write_bytes(file, save(tensors)), "shapes": shapes}

        self._try("dense", write)

    def _try(self, key: Any, write: Callable[[], Any]) -> None:
        problem = _problem_of(lambda: self.files.__setitem__(key, write()))
        self.problem = self.problem or problem


def published_of(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the step of a checkpoint, and which publication it comes after, where it is of one
    job's publications."""
    published = {"step": checkpoint.get("global_step")}
    jobs = checkpoint.get(STATE, {})
    if len(jobs) == 1:
        ((published["job"], state),) = jobs.items()
        published |= {name: state[name] for name in ("run", "sequence", "id")}
    return published


def num_writes(trainer: Trainer) -> Any:
    """Return how often rows of this rank's tables were written, but by FBGEMM."""
    tables: Any = getattr(trainer.strategy, "run_tables", None)
    if tables is None:
        return None
    weights = [shard for shards in tables.shards.parameters().values() for shard in shards]
    with without_torch_function():
        return versions_of(weights), dict(tables.shards.state.writes)


def _crc32(tensors: Mapping[str, Tensor]) -> int:
    checksum = 0
    for tensor in tensors.values():
        checksum = zlib.crc32(tensor.view(-1).view(torch.uint8).numpy().tobytes(), checksum)
    return checksum


def _problem_of(action: Callable[[], Any]) -> str:
    """Return why an action fails; "" if it does not."""
    try:
        action()
    except Exception as error:  # object stores raise errors of their own
        return f"{type(error).__name__}: {error}"
    return ""


class _RawIds:
    """The raw ids of tables that have rows for values of a vocabulary. by_table: the user's choice;
    vocabularies: of the data's columns."""

    def __init__(self, by_table: Mapping[str, str], vocabularies: Mapping[str, list[str]]) -> None:
        self._by_table = by_table
        self._vocabularies = vocabularies
        self._used: set[str] = set()

    def of_table(self, table: Any) -> Any:
        """Return the raw id of each row, an Arrow array with nulls; None: an id is the number of
        its row, or mapped."""
        import pyarrow

        names = {name for name in (table.full_name, table.name) if name in self._by_table}
        self._used |= names
        columns = {self._by_table[name] for name in names}
        if not columns and table.mapping is None:
            # Of several features that share rows, a row has no single value.
            columns = set(table.config.feature_names)
            if len(columns) > 1 or not columns <= self._vocabularies.keys():
                return None
        for column in columns:
            if column not in self._vocabularies:
                raise ConfigError(
                    f"PublishRows: vocabularies: the data's columns have no vocabulary {column!r}"
                    f"{did_you_mean(column, self._vocabularies)}"
                )
            # Row 0 is that of values that the vocabulary does not have.
            values = [None, *self._vocabularies[column]]
            num_rows = table.config.num_embeddings
            return pyarrow.array([*values, *[None] * (num_rows - len(values))][:num_rows])
        return None

    def refuse_unused(self) -> None:
        """Raise ConfigError: a name is that of no table."""
        for name in self._by_table.keys() - self._used:
            raise ConfigError(f"PublishRows: vocabularies: there is no table {name!r}.")
