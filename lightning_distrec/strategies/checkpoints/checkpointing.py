"""A strategy's checkpoints: what Lightning's hooks for saving and loading do, in the order of their
calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import lightning.pytorch as pl
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_distrec.checkpoint.checkpoint_options import CheckpointOptions
from lightning_distrec.checkpoint.host_copies import gather_full
from lightning_distrec.checkpoint.hyperparameters import HYPERPARAMETERS, saved_form
from lightning_distrec.checkpoint.load import Loaded
from lightning_distrec.checkpoint.plain_state import as_chunked, refuse_not_plain, with_plain_types
from lightning_distrec.checkpoint.save import (
    STATE_FILE,
    RankContent,
    Saver,
    Snapshot,
    rank_file,
    take_folder_snapshot,
)
from lightning_distrec.checkpoint.single_file import fits_in_one_file, take_file_snapshot
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import CheckpointError, ConfigError
from lightning_distrec.strategies.checkpoints.checkpoint_io import (
    is_elsewhere,
    is_plugin,
    open_stored,
    read_checked,
    refuse_folder,
)
from lightning_distrec.strategies.checkpoints.grown_tables import (
    AVERAGES,
    grow_tables,
    grows,
    start_columns,
)
from lightning_distrec.strategies.checkpoints.incremental_saves import IncrementalSaves
from lightning_distrec.strategies.checkpoints.module_weights import load_weights
from lightning_distrec.strategies.checkpoints.optimizer_state import (
    OF_TABLES,
    START,
    OptimizerStates,
    StateRanks,
)
from lightning_distrec.strategies.checkpoints.positions import HookDraws, Positions
from lightning_distrec.strategies.checkpoints.resuming import JobFit
from lightning_distrec.strategies.checkpoints.table_states import SavedTables
from lightning_distrec.versions import find_installed

if TYPE_CHECKING:  # it loads torchrec, which modules without tables do not need
    from lightning_distrec.sharding.sharders import ShardingByTable

MEETING_SECONDS = 20.0
"""How long a rank waits for the others to save a checkpoint with it after an exception."""
LEAVING_SECONDS = 120.0
"""How long a run that has failed waits for a checkpoint that is still being written."""
_TRAINED: WeakSet[LightningModule] = WeakSet()
"""Modules that were in a fit, or whose weights are a checkpoint's."""


class Checkpointing:
    """Saves and loads the checkpoints of one strategy; `begin` is called for each run."""

    def __init__(
        self,
        options: CheckpointOptions,
        consensus: Consensus,
        writer_ranks: Consensus,
        module: LightningModule,
        note_writing: Callable[[bool], None],
    ) -> None:
        """writer_ranks: where a thread writes while training goes on, its own consensus.
        note_writing: as Saver's."""
        self.options = options
        self._ranks = consensus
        self._saver = Saver(writer_ranks, options.async_save, options.writing_limit, note_writing)
        self._module = module
        self._tables: SavedTables | None = None
        self._job: JobFit | None = None
        self._incremental: IncrementalSaves | None = None
        self._added: set[str] = set()
        """Keys of tables that the data have and the checkpoint has not."""
        self.state_ranks: StateRanks | None = None
        """Which ranks hold the optimizer state of a parameter, until the next run; None: all do."""
        self.positions = Positions(consensus)
        self.fingerprints = ("", "")
        """Of the random generators when the ranks had met, and after the last hook named setup."""
        self._has_started = False
        self._was_trained = False
        """Whether the module was in a fit before this one."""
        self._warned: set[str] = set()

    def start_run(self, module: LightningModule, job: JobFit | None = None) -> None:
        """Drop what belongs to the run before; called when a run's set-up starts. job: what its
        checkpoints are of."""
        self._module = module
        self._tables = None
        self.state_ranks = None
        self._job = job
        self._incremental = None
        self._added = set()
        # else the position is that of the last fit
        if job is None or module.trainer.state.fn == TrainerFn.FITTING:
            self.positions = Positions(self._ranks, HookDraws(*self.fingerprints))

    def begin(self, tables: SavedTables | None) -> None:
        """Collective, when a run is set up. Load the weights that it starts from, unless an earlier
        run has."""
        self._tables = tables
        module = self._module
        # Agreed on with the other flags of a step: all ranks raise at the same step.
        self._ranks.flags.watch_failures(lambda: self._saver.has_failed)
        if not self.options.pickles:
            self._ranks.all_or_none("setup", lambda: refuse_callbacks(module.trainer))
        if self.options.async_save:
            announce_in_flight(module.trainer, self._saver)
        if module.trainer.state.fn == TrainerFn.FITTING:
            self._begin_fit()
        path = self.options.start_from
        # Once in the life of a strategy: a second fit goes on from what the first one has learned.
        if path is None or self._has_started:
            return
        loaded = self._load(path)
        self._take_columns(loaded.checkpoint, resumes=False)
        self._ranks.all_or_none("setup", lambda: start_columns(loaded.checkpoint, module))
        self.load_model(loaded.checkpoint, module.strict_loading)
        self._has_started = module.trainer.state.fn == TrainerFn.FITTING or not grows(module)
        rank_zero_info(f"The run starts from the weights in {path}.")

    def _begin_fit(self) -> None:
        trainer = self._module.trainer
        self._was_trained = self._module in _TRAINED
        _TRAINED.add(self._module)
        if not self.options.pickles and trainer.checkpoint_callbacks:
            prepare_hyperparameters(current_hyperparameters(trainer), self._warned)
            # What it returns is known when it is called: a trial could change what the user's hook
            # changes.
            if is_overridden("on_save_checkpoint", self._module):
                rank_zero_info(
                    f"What {type(self._module).__name__}.on_save_checkpoint adds to checkpoints "
                    "must be of plain types: objects are an error when the first one is saved, "
                    "unless checkpoint={'pickles': True} is set."
                )
        if self.options.incremental is not None:
            self._incremental = IncrementalSaves(
                self.options.incremental,
                self._ranks,
                self._tables,
                trainer,
                self._job.label if self._job is not None else "",
                self._saver.remove,
            )

    @property
    def _own_optimizers(self) -> list[Optimizer]:
        return [] if self._tables is None else self._tables.own_optimizers

    def require_all_ranks(self, meet: Callable[[float], bool]) -> None:
        """Collective, before a checkpoint after an exception. Raises CheckpointError: a rank is
        missing for 20 s.

        meet: returns whether all ranks arrive within some seconds.
        """
        self._saver.finish(LEAVING_SECONDS)
        if not meet(MEETING_SECONDS):
            raise CheckpointError(
                "no checkpoint is saved after the exception above: it was raised on rank "
                f"{self._ranks.rank}, and not all of the other ranks arrived to save their shards "
                f"within {MEETING_SECONDS:.0f} s."
            )

    def full_state(self, state: Mapping[str, Any], everywhere: bool = False) -> dict[str, Any]:
        """Collective. Return a state with full tables on rank 0's host, and none elsewhere; or full
        on all ranks."""
        full: dict[str, Any] = gather_full(state, self._ranks, everywhere=everywhere)
        if everywhere or self._ranks.rank == 0:
            return full
        return {key: value for key, value in full.items() if as_chunked(state[key]) is None}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Collective. Return an optimizer's state as it is saved."""
        return self._optimizer_states().collect(optimizer)

    def _optimizer_states(self) -> OptimizerStates:
        return OptimizerStates(
            self._module, self._tables, self._ranks, self.state_ranks, self.options.grow_tables
        )

    def save(
        self, checkpoint: dict[str, Any], path: str | Path, io: CheckpointIO, storage_options: Any
    ) -> None:
        """Collective. Write a checkpoint, a folder or a file, or start to.

        io: what writes files that are not on a local path, or all files if it is a plugin of the
        user's.
        Raises CheckpointError on every rank: it cannot be written; ConfigError: a folder is not for
        `io`.
        """
        pickles = self.options.pickles
        if not pickles:
            prepare_hyperparameters(checkpoint, self._warned)
        if self._tables is not None and "optimizer_states" in checkpoint:
            table_states = []
            for optimizer in self._own_optimizers:
                table_states.append(self.optimizer_state(optimizer) | {OF_TABLES: True})
            checkpoint["optimizer_states"] = [*checkpoint["optimizer_states"], *table_states]
        # ModelCheckpoint names files by metrics and by what is on disk, which may differ between
        # ranks.
        location: str = self._ranks.all_gather(str(path))[0]
        rank_state = self.positions.extract_rank_state(checkpoint, self._module.trainer)
        label = self._job_label(checkpoint, location)
        mark = {} if self._incremental is None else self._incremental.take(checkpoint, location)
        plan = {} if self._tables is None else _plan_in_words(self._tables.shards.plan)
        content = RankContent(
            path=Path(location).absolute(),
            checkpoint=checkpoint,
            rank_state=rank_state,
            facts={"job": label, "versions": str(find_installed()), "plan": plan, **mark},
            extra_files={} if self._tables is None else self._tables.plan_files(),
            pickles=pickles,
        )
        # A plugin writes files only, and a difference is a folder. Rank 0 decides: it depends on
        # free memory.
        is_file = not mark and (
            is_plugin(io) or fits_in_one_file(checkpoint, self.options, self._ranks)
        )
        uses_io = is_elsewhere(location, io) or storage_options is not None
        if uses_io and (self.options.async_save or not is_file):
            refuse_folder(location, storage_options)
        snapshot: Snapshot
        if not is_file:
            snapshot = take_folder_snapshot(content, self._ranks)
        else:
            # Stock Lightning reads files as well, and looks for its loaders' states there.
            content = replace(
                content, checkpoint=self.positions.add_loader_states(checkpoint, rank_state)
            )
            # By position: a plugin of the user's may call the path something else.
            save = partial(_save_with, io, location, storage_options) if uses_io else None
            snapshot = take_file_snapshot(content, self._ranks, save)
        self._saver.save(snapshot)
        # after the run nothing else waits for it
        if self._module.trainer.state.status != TrainerStatus.RUNNING:
            self._saver.finish()

    def _job_label(self, checkpoint: Mapping[str, Any], path: str) -> str:
        """Return what a checkpoint says of its job; "" where a restart may not go on from it: after
        exceptions."""
        trainer = self._module.trainer
        # After an exception it may be of the middle of a step, which some parameters have made
        # already.
        is_of_fit = trainer.state.fn == TrainerFn.FITTING and "optimizer_states" in checkpoint
        if self._job is None or not is_of_fit or trainer.interrupted:
            return ""
        # Before writing: a job that dies right after the rename still finds the checkpoint.
        self._job.note_saving(path)
        return self._job.label

    def remove(self, path: str | Path) -> None:
        """Remove a checkpoint; while one is being written, after that is complete."""
        self._saver.remove(Path(path).absolute())

    def before_step(self) -> None:
        """Raise CheckpointError on every rank, at the same step, once a write in the background has
        failed."""
        if self._ranks.flags.has_failed:
            self._saver.finish()

    def finish(self, has_failed: bool) -> None:
        """Collective. Wait for a checkpoint that is being written. has_failed: the run has; wait
        120 s at most."""
        # Flags live as long as the process, and the function that they hold leads to this run's
        # tables.
        self._ranks.flags.watch_failures(None)
        if self._incremental is not None:
            self._incremental.release()
        try:
            self._saver.finish(LEAVING_SECONDS if has_failed else None)
        except CheckpointError as error:
            if not has_failed:
                raise
            rank_zero_warn(str(error))  # the exception that ends the run is the one to raise

    def load(self, path: str | Path) -> dict[str, Any]:
        """Collective. Return a checkpoint for Lightning's hooks; tables and their state are handles
        to read from."""
        # The checkpoint to load may be the one that is being written.
        self._saver.finish()
        loaded = self._load(path)
        checkpoint = loaded.checkpoint
        if (
            self._module.trainer.state.fn == TrainerFn.FITTING
            and "optimizer_states" not in checkpoint
        ):
            raise CheckpointError(
                f"{path} holds weights only, so that training cannot resume from it. To start from "
                "them, set checkpoint={'start_from': path} in the strategy, and no ckpt_path."
            )
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            add_groups(self._module.trainer, checkpoint, self._optimizer_states().parameters)
            self._take_columns(checkpoint, resumes=True)
            self._ranks.all_or_none("loading a checkpoint", lambda: self._resume(path, loaded))
        return checkpoint

    def _take_columns(self, checkpoint: dict[str, Any], resumes: bool) -> None:
        """Collective. Let data that grow go on with the rows of the checkpoint."""
        if self._module.trainer.state.fn != TrainerFn.FITTING:
            return
        shards = None if self._tables is None else self._tables.shards
        grow = partial(
            grow_tables, checkpoint, shards=shards, resumes=resumes, was_trained=self._was_trained
        )
        self._added = self._ranks.all_or_none("loading a checkpoint", lambda: grow(self._module))

    def _resume(self, path: str | Path, loaded: Loaded) -> None:
        """Raises CheckpointError: the state of the loops, or of this rank, lacks something."""
        try:
            trainer = self._module.trainer
            num_accumulated = (
                trainer.accumulate_grad_batches if self._module.automatic_optimization else 1
            )
            self.positions.restore(loaded, num_accumulated)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"{path} is damaged: {STATE_FILE} or {rank_file(self._ranks.rank)} is not as "
                f"written ({error!r})."
            ) from error

    def _load(self, path: str | Path) -> Loaded:
        io = self._module.trainer.strategy.checkpoint_io
        is_checked = self._job is not None and str(path) == self._job.checked_path
        if self._job is not None:
            self._job.checked_path = ""
        loaded = read_checked(
            partial(open_stored, path, io), path, self._ranks, self.options.pickles, is_checked
        )
        checkpoint = loaded.checkpoint
        renamed = self.options.renamed
        checkpoint["state_dict"] = {
            renamed(name): value for name, value in checkpoint["state_dict"].items()
        }
        for state in checkpoint.get("optimizer_states", []):
            if "optimizer" in state:  # torch's own have numbers
                state["state"] = {renamed(name): value for name, value in state["state"].items()}
                for group in state["param_groups"]:
                    group["params"] = list(map(renamed, group["params"]))
        # Lightning migrates checkpoints by this key, which a bare state_dict has not.
        checkpoint.setdefault("pytorch-lightning_version", pl.__version__)
        return loaded

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Collective. Load the module's state; every rank reads its own shards of tables."""
        _TRAINED.add(self._module)
        shards = None if self._tables is None else self._tables.shards
        state = checkpoint["state_dict"]
        grow = self.options.grow_tables
        load = partial(load_weights, strict=strict, grow=grow, added=self._added)
        self._ranks.all_or_none("loading a checkpoint", lambda: load(self._module, shards, state))

    def load_optimizers(self, checkpoint: Mapping[str, Any], optimizers: list[Optimizer]) -> None:
        """Collective. Load the optimizers' state, of tables too."""
        states = self._optimizer_states()
        saved = checkpoint["optimizer_states"]
        self._ranks.all_or_none(
            "loading a checkpoint", lambda: states.load(saved, optimizers, self._own_optimizers)
        )


def _plan_in_words(plan: ShardingByTable) -> dict[str, Any]:
    """Return each table's sharding type, kernel and ranks, for people and for JSON."""
    return {
        name: {
            "sharding_type": p.sharding_type,
            "kernel": p.compute_kernel,
            "ranks": sorted(set(p.ranks or [])),
        }
        for name, p in plan.items()
    }


def _save_with(
    io: CheckpointIO, location: str, storage_options: Any, content: dict[str, Any]
) -> None:
    io.save_checkpoint(content, location, storage_options=storage_options)


def announce_in_flight(trainer: Trainer, saver: Saver) -> None:
    """Let ModelCheckpoint see the checkpoint in flight: it asks the file system whether a name is
    taken."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            if callback.save_last == "link":
                problem = "the link would lead to a checkpoint that is not there yet"
                raise ConfigError(
                    f"ModelCheckpoint(save_last='link') and async_save: {problem}. Set "
                    "save_last=True."
                )
            # On the instance: ModelCheckpoints of other trainers, without async_save, keep the
            # method of the class.
            is_written = partial(_is_written, saver, callback)
            callback.file_exists = is_written  # type: ignore[method-assign]


def _is_written(saver: Saver, callback: ModelCheckpoint, filepath: Any, trainer: Trainer) -> bool:
    is_being_written = saver.in_flight == Path(filepath).absolute()
    # The class's method: the instance's attribute of that name is this function.
    return is_being_written or type(callback).file_exists(callback, filepath, trainer)


def prepare_hyperparameters(checkpoint: dict[str, Any], warned: set[str]) -> None:
    """Put what can be saved in place of hyperparameters that cannot, and warn of those, and of
    those that are objects.

    Loading an object by itself would run code, so that load_from_checkpoint asks for it by its
    name.
    """
    reasons: dict[str, str] = {}
    for key in HYPERPARAMETERS.keys() & checkpoint.keys():
        if not isinstance(checkpoint[key], dict):  # a container of OmegaConf's
            continue
        saved = {}
        for name, value in checkpoint[key].items():
            saved[name], reason = saved_form(name, value)
            if reason and name not in warned:
                reasons[name] = reason
        checkpoint[key] = saved
    if reasons:
        rank_zero_warn(
            "checkpoints of this run hold hyperparameters that are objects: "
            f"{'; '.join(reasons.values())}. load_from_checkpoint(path) asks for these by name; "
            "load_from_checkpoint(path, weights_only=False) reads those that can be saved, and "
            "runs their code."
        )
        warned.update(reasons)


def current_hyperparameters(trainer: Trainer) -> dict[str, Any]:
    """Return what Lightning will save of the hyperparameters."""
    module = trainer.lightning_module
    data = getattr(trainer, "datamodule", None)
    sources = [source for source in (module, data) if source is not None and source.hparams]
    return {source.CHECKPOINT_HYPER_PARAMS_KEY: source.hparams for source in sources}


def add_groups(
    trainer: Trainer,
    checkpoint: Mapping[str, Any],
    parameters: Mapping[str, list[nn.Parameter]],
) -> None:
    """Unfreeze what a BaseFinetuning callback had unfrozen, and add its param groups.

    parameters: by the names that checkpoints have; those of a table are all shards of this rank.
    Raises CheckpointError: their parameters are not known, or not there.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    if not any(isinstance(callback, BaseFinetuning) for callback in callbacks):
        return
    pairs = zip(trainer.optimizers, checkpoint["optimizer_states"], strict=False)
    for number, (optimizer, state) in enumerate(pairs):
        groups = len(optimizer.param_groups)
        saved = len(state["param_groups"])
        for group in state["param_groups"][groups:]:
            if not parameters.keys() >= set(group["params"]):
                raise CheckpointError(
                    f"optimizer {number} has {groups} param group(s), and the checkpoint's had "
                    f"{saved}: a BaseFinetuning callback has added some, and would unfreeze "
                    f"nothing now. Return as many, {START}"
                )
            unfrozen = []
            for name in group["params"]:
                unfrozen += [parameter.requires_grad_() for parameter in parameters[name]]
            optimizer.add_param_group({**group, "params": unfrozen})


def refuse_callbacks(trainer: Trainer) -> None:
    """Raise CheckpointError, before the run starts, where the state of a callback of the user's
    could not be saved."""
    if trainer.state.fn != TrainerFn.FITTING or not trainer.checkpoint_callbacks:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        # Also in subclasses of the averages; Lightning's other callbacks have plain types.
        if isinstance(callback, AVERAGES) or type(callback).__module__.startswith("lightning."):
            continue
        state = with_plain_types(callback.state_dict())
        refuse_not_plain(state, f"the state_dict of {type(callback).__name__}: state")
