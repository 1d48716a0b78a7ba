"""What a strategy does about checkpoints, in the order in which Lightning asks for it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_distrec.checkpoint.chunking import as_chunked
from lightning_distrec.checkpoint.gather import gather_on_rank_0
from lightning_distrec.checkpoint.generators import generator_states, set_generator_states
from lightning_distrec.checkpoint.lazy_tensors import as_lazy, materialized_as
from lightning_distrec.checkpoint.load import Loaded, load
from lightning_distrec.checkpoint.options import CheckpointOptions
from lightning_distrec.checkpoint.plain_state import (
    find_not_plain,
    plain_optimizer_state,
    refuse_not_plain,
    with_plain_numbers,
)
from lightning_distrec.checkpoint.save import STATE_FILE, Saver, rank_file, take_snapshot
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import CheckpointError, ConfigError
from lightning_distrec.pipeline.position import adapt_progress, states_of_all_ranks
from lightning_distrec.strategies.checkpoints.optimizer_state import OptimizerStates
from lightning_distrec.strategies.checkpoints.positions import Positions
from lightning_distrec.strategies.checkpoints.saved_tables import SavedTables
from lightning_distrec.strategies.checkpoints.zero_state import OwnerOf
from lightning_distrec.versions import find_installed

if TYPE_CHECKING:  # they load torchrec, which modules without tables have no use for
    from lightning_distrec.sharding.sharded_tables import ShardedTables
    from lightning_distrec.sharding.sharders import ShardingByTable

HYPERPARAMETERS = (LightningModule.CHECKPOINT_HYPER_PARAMS_KEY, LightningDataModule.CHECKPOINT_HYPER_PARAMS_KEY)
POSITIONS = "distrec_positions"
"""Where positions of loaders are in the fit loop's state: stock Lightning, which could not use them, passes it over."""
MEETING_SECONDS = 20.0
"""How long a rank waits for the others to save a checkpoint with it after an exception."""
LEAVING_SECONDS = 120.0
"""How long a run that has failed waits for a checkpoint that is still being written."""


class Checkpointing:
    """Saves and loads the checkpoints of one strategy; `begin` is called for each run."""

    def __init__(
        self, options: CheckpointOptions, consensus: Consensus, of_writer: Consensus, module: LightningModule
    ) -> None:
        """of_writer: a consensus whose group nobody else uses, since a thread may while the steps go on."""
        self._options = options
        self._ranks, self._of_writer = consensus, of_writer
        self._saver = Saver(of_writer, options.async_save)
        self._module = module
        self._tables: SavedTables | None = None
        self._owner_of: OwnerOf | None = None
        self._resumed_generators: Any = None
        self._positions = Positions(consensus.rank, consensus.num_ranks)
        self._has_started = False
        self._told: set[str] = set()

    def start_run(self, module: LightningModule) -> None:
        """Forget the run before; called when a run's set-up begins."""
        self._module, self._tables, self._owner_of, self._resumed_generators = module, None, None, None
        self._positions = Positions(self._ranks.rank, self._ranks.num_ranks)

    def begin(self, tables: SavedTables | None) -> None:
        """Collective, when a run is set up. Load the weights that it starts from, unless an earlier run has.

        tables: the module's sharded tables; None where it has none.
        """
        self._tables, module = tables, self._module
        self._ranks.flags.watch_failures(lambda: self._saver.has_failed)
        self._ranks.all_or_none("setup", lambda: _refuse_what_cannot_be_saved(module.trainer))
        if self._options.async_save:
            self._show_what_is_being_written(module.trainer)
        path = self._options.start_from
        if path is None or self._has_started:
            return
        loaded = self._load(path)
        self.load_model(loaded.checkpoint, module.strict_loading)
        self._has_started = True
        rank_zero_info(f"The run starts from the weights in {path}.")

    def _show_what_is_being_written(self, trainer: Trainer) -> None:
        """Let ModelCheckpoint, which gives a name that is taken a version, see the one that is not there yet."""
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                if callback.save_last == "link":
                    raise ConfigError(
                        "ModelCheckpoint(save_last='link') and async_save: the link would lead to a checkpoint that is "
                        "not there yet. Set save_last=True."
                    )
                callback.file_exists = partial(self._exists, callback)  # type: ignore[method-assign]

    def _exists(self, callback: ModelCheckpoint, filepath: Any, trainer: Trainer) -> bool:
        is_being_written = self._saver.in_flight == Path(filepath).absolute()
        return is_being_written or type(callback).file_exists(callback, filepath, trainer)

    def share_out_state(self, owner_of: OwnerOf) -> None:
        """From now on, until a run begins anew, one rank keeps the optimizer's state of each parameter."""
        self._owner_of = owner_of

    def require_all_ranks(self) -> None:
        """Collective, before a checkpoint that an exception makes (OnExceptionCheckpoint, say): one rank may be alone.

        Raises CheckpointError: the others are not here within 20 s; they may be waiting for this rank elsewhere.
        """
        self._saver.finish(LEAVING_SECONDS)
        if not self._of_writer.barrier(MEETING_SECONDS):
            raise CheckpointError(
                f"no checkpoint is saved after the exception above: it was raised on rank {self._ranks.rank}, and not "
                f"all of the other ranks have come to save their parts within {MEETING_SECONDS:.0f} s. Earlier "
                "checkpoints are as they were."
            )

    def model_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Collective. Return the module's state as it is saved: tables in parts, or, in one file, whole on rank 0."""
        found = {key: as_chunked(value) or value for key, value in state.items()}
        return found if self._options.distributed else self.whole(found)

    def whole(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Collective. Return a state with whole tables on the host of rank 0; other ranks get it without them."""
        gathered: dict[str, Any] = gather_on_rank_0(state, self._ranks)
        if self._ranks.rank == 0:
            return gathered
        return {key: value for key, value in gathered.items() if as_chunked(state[key]) is None}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Collective. Return an optimizer's state as it is saved."""
        state = OptimizerStates(self._module, self._tables, self._ranks, self._owner_of).of(optimizer)
        return state if self._options.distributed else plain_optimizer_state(gather_on_rank_0(state, self._ranks))

    @property
    def writes_folders(self) -> bool:
        """Whether checkpoints are folders that all ranks write; else they are Lightning's own files."""
        return self._options.distributed

    def save(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Collective. Write a checkpoint's folder, or begin to."""
        if "://" in str(path):
            raise ConfigError(
                f"{path}: folders that all ranks write need a file system; set dirpath to a folder on one, or "
                "checkpoint={'distributed': False} to let rank 0 write one file."
            )
        of_rank = {"loaders": self._share_positions(checkpoint), "generators": generator_states()}
        marker = {
            "epoch": checkpoint["epoch"],
            "global_step": checkpoint["global_step"],
            "versions": str(find_installed()),
            "plan": {} if self._tables is None else _plan_in_words(self._tables.shards.plan),
        }
        path = Path(self._ranks.all_gather(str(path))[0])
        further = {} if self._tables is None else self._tables.plan_files()
        self._saver.save(take_snapshot(path.absolute(), checkpoint, of_rank, marker, self._ranks, further))
        if self._module.trainer.state.status != TrainerStatus.RUNNING:  # nothing comes after it that would wait
            self._saver.finish()

    def _share_positions(self, checkpoint: dict[str, Any]) -> list[Any]:
        """Collective. Leave in the checkpoint what any number of ranks can make use of; return what this rank had."""
        state = checkpoint["loops"]["fit_loop"]["state_dict"]
        mine: list[Any] = state.pop("combined_loader", [])
        shared = states_of_all_ranks(self._ranks.all_gather(mine))
        if shared:
            state[POSITIONS] = shared
        return mine

    def make_plain(self, checkpoint: dict[str, Any]) -> None:
        """Collective. Leave out hyperparameters that are no plain types, and say so.

        Raises CheckpointError on every rank: something else is no plain type.
        """
        for kind in HYPERPARAMETERS:
            if kind not in checkpoint:
                continue
            given = checkpoint[kind]
            refused = [name for name, value in given.items() if find_not_plain(value) is not None]
            checkpoint[kind] = {name: value for name, value in given.items() if name not in refused}
            for name in sorted(set(refused) - self._told):
                rank_zero_warn(
                    f"the hyperparameter '{name}' is a {type(given[name]).__name__} and not in checkpoints, which hold "
                    "plain types only. Pass it to load_from_checkpoint, or leave it out of save_hyperparameters."
                )
                self._told.add(name)
        if not self._options.distributed:
            mine = self._share_positions(checkpoint)
            state = checkpoint["loops"]["fit_loop"]["state_dict"]
            if mine and POSITIONS not in state:  # of another kind: as Lightning has it
                state["combined_loader"] = mine
            checkpoint.update(with_plain_numbers(checkpoint))
            self._ranks.all_or_none("saving a checkpoint", lambda: refuse_not_plain(checkpoint))

    def remove(self, path: str | Path) -> None:
        """Remove a checkpoint; not before one that is being written is complete."""
        self._saver.remove(Path(path).absolute())

    def before_step(self) -> None:
        """Raise CheckpointError on every rank, at the same step, once a write behind the steps has failed."""
        if self._ranks.flags.has_failed:
            self._saver.finish()

    def finish(self, has_failed: bool) -> None:
        """Collective. Wait for a checkpoint that is being written. has_failed: the run has; the wait has an end."""
        self._ranks.flags.watch_failures(None)
        try:
            self._saver.finish(LEAVING_SECONDS if has_failed else None)
        except CheckpointError as error:
            if not has_failed:
                raise
            rank_zero_warn(str(error))  # the exception that ends the run is the one to see

    def load(self, path: str | Path) -> dict[str, Any]:
        """Collective. Return a checkpoint for Lightning's hooks; tables and their state are handles to read from."""
        self._saver.finish()
        loaded = self._load(path)
        checkpoint = loaded.checkpoint
        if self._module.trainer.state.fn == TrainerFn.FITTING and "optimizer_states" not in checkpoint:
            raise CheckpointError(
                f"{path} holds weights only, so that training cannot go on from it. To start a new run from them, set "
                "checkpoint={'start_from': path} in the strategy, and no ckpt_path."
            )
        if self._module.trainer.state.fn == TrainerFn.FITTING:
            self._ranks.all_or_none("loading a checkpoint", lambda: self._go_on_as(path, loaded))
        return checkpoint

    def _go_on_as(self, path: str | Path, loaded: Loaded) -> None:
        """Raises CheckpointError: the state of the loops, or what this rank alone had saved, lacks something."""
        try:
            self._load_places(loaded.checkpoint["loops"]["fit_loop"], loaded)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise CheckpointError(
                f"{path} is damaged: {STATE_FILE} or {rank_file(self._ranks.rank)} is not as written ({error!r})."
            ) from error

    def _load_places(self, fit_loop: dict[str, Any], loaded: Loaded) -> None:
        """Where the dataloaders and the random generators go on."""
        if shared := fit_loop["state_dict"].pop(POSITIONS, []):
            fit_loop["state_dict"]["combined_loader"] = shared
        if loaded.rank_state is not None:
            fit_loop["state_dict"]["combined_loader"] = loaded.rank_state["loaders"]
            set_generator_states(loaded.rank_state["generators"])
            self._resumed_generators = loaded.rank_state["generators"]
        elif loaded.rank_0_state is not None and loaded.marker is not None:
            rank_zero_info(
                f"The checkpoint was written by {loaded.marker.get('num_ranks')} ranks, and there "
                f"are {self._ranks.num_ranks}: random generators begin anew."
            )
            if loaded.rank_0_state["loaders"] and not fit_loop["state_dict"].get("combined_loader"):
                rank_zero_warn(
                    "the checkpoint holds a state of the dataloader for each of its ranks, which cannot be shared out "
                    "among another number of ranks: an epoch that it was in the middle of begins anew."
                )
        adapt_progress(fit_loop, self._ranks.num_ranks)

    def keep_position(self, loader: Any) -> Any:
        """Return a training loader whose position is in the checkpoints."""
        return self._positions.keep(loader)

    def on_train_start(self) -> None:
        """Let random generators and Lightning's count of batches go on where the checkpoint was, if there was one."""
        trainer = self._module.trainer
        self._positions.resume(trainer)
        # Loaders that were begun meanwhile have drawn; what they drew belongs to the run only where an epoch begins.
        if self._resumed_generators is not None and (self._positions.are_kept or trainer.fit_loop.restarted_mid_epoch):
            set_generator_states(self._resumed_generators)
        self._resumed_generators = None

    def _load(self, path: str | Path) -> Loaded:
        loaded = self._ranks.all_or_none(
            "loading a checkpoint", lambda: load(Path(path), self._ranks.rank, self._ranks.num_ranks)
        )
        checkpoint = loaded.checkpoint
        renamed = self._options.renamed
        checkpoint["state_dict"] = {renamed(name): value for name, value in checkpoint["state_dict"].items()}
        for state in checkpoint.get("optimizer_states", []):
            if "optimizer" in state:  # torch's own have numbers
                state["state"] = {renamed(name): value for name, value in state["state"].items()}
                for group in state["param_groups"]:
                    group["params"] = [renamed(name) for name in group["params"]]
        checkpoint.setdefault("pytorch-lightning_version", pl.__version__)
        return loaded

    def load_model(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Collective. Load the module's state; every rank reads its own parts of tables."""
        self._ranks.all_or_none("loading a checkpoint", lambda: self._load_model(checkpoint["state_dict"], strict))

    def _load_model(self, state: Mapping[str, Any], strict: bool) -> None:
        keys = {} if self._tables is None else self._load_tables(self._tables.shards, state)
        sharded = {
            name: parameter
            for name, parameter in self._module.named_parameters(remove_duplicate=False)
            if isinstance(parameter, DTensor)
        }
        rest = {key: materialized_as(value, sharded.get(key)) for key, value in state.items() if key not in keys}
        try:
            missing, unexpected = self._module.load_state_dict(rest, strict=False)
        except RuntimeError as error:
            raise CheckpointError(f"the checkpoint does not fit the module: {error}") from None
        further = tuple(f"{key}_" for key in keys)  # of tables with several shards on this rank
        missing = [key for key in missing if key not in keys and not key.startswith(further)]
        # A module that two names lead to is saved under both.
        here = {full_name for key, full_name in keys.items() if key in state}
        missing += [key for key, full_name in keys.items() if full_name not in here]
        if strict and (missing or unexpected):
            raise CheckpointError(
                f"the checkpoint does not fit the module: missing {missing}, unexpected {unexpected}. Build the module "
                "that was saved; map names that have changed with checkpoint={'rename': {old: new}}; or set "
                "strict_loading=False on the module to keep what is missing as it is."
            )
        if missing or unexpected:
            rank_zero_warn(
                f"the checkpoint was loaded in part, as strict_loading=False allows: missing, and as they were, "
                f"{missing}; in the checkpoint only {unexpected}."
            )

    def _load_tables(self, shards: ShardedTables, state: Mapping[str, Any]) -> dict[str, str]:
        """Load the tables that are in `state`; return key -> full name of all tables."""
        keys = shards.keys_in_tree()
        shapes = {table.full_name: _shape(table.config) for table in shards.tables}
        for key in (key for key in state if key in keys):
            self._load_table(shards, key, keys[key], shapes[keys[key]], state[key])
        return keys

    def _load_table(self, shards: ShardedTables, key: str, name: str, wanted: tuple[int, int], value: Any) -> None:
        lazy = as_lazy(value)
        found = tuple(lazy.shape) if lazy is not None else type(value).__name__
        grows = lazy is not None and len(lazy.shape) == 2 and lazy.shape[1] == wanted[1] and lazy.shape[0] < wanted[0]
        if found != wanted and not (grows and self._options.grow_tables):
            hint = " To keep its rows and begin the others anew, set checkpoint={'grow_tables': True}." if grows else ""
            raise CheckpointError(
                f"table '{name}' is {wanted[0]} x {wanted[1]}, but the checkpoint's '{key}' is {found}.{hint}"
            )
        shards.load(name, lazy if not isinstance(value, torch.Tensor) else value)
        if found != wanted:
            rank_zero_info(f"table '{name}' has grown from {found[0]} rows to {wanted[0]}; the further ones are new.")

    def load_optimizers(self, checkpoint: Mapping[str, Any], optimizers: list[Optimizer]) -> None:
        """Collective. Load the optimizers' state, of tables too."""
        states = OptimizerStates(self._module, self._tables, self._ranks, self._owner_of)
        self._ranks.all_or_none(
            "loading a checkpoint",
            lambda: states.load(
                checkpoint["optimizer_states"],
                optimizers,
                rank_zero_warn,
                self._options.grow_tables,
            ),
        )


def _refuse_what_cannot_be_saved(trainer: Trainer) -> None:
    """Raise CheckpointError where a checkpoint of the run that begins could not be written.

    Looks at callbacks of the user's own only: Lightning's keep plain types, or copies of the whole model.
    """
    if trainer.state.fn != TrainerFn.FITTING or not trainer.checkpoint_callbacks:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not type(callback).__module__.startswith("lightning."):
            refuse_not_plain(
                with_plain_numbers(callback.state_dict()), f"the state_dict of {type(callback).__name__}: state"
            )


def _shape(config: Any) -> tuple[int, int]:
    return config.num_embeddings, config.embedding_dim


def _plan_in_words(plan: ShardingByTable) -> dict[str, Any]:
    """Return each table's sharding type, kernel and ranks, for people and for JSON."""
    return {
        name: {"sharding_type": p.sharding_type, "kernel": p.compute_kernel, "ranks": sorted(set(p.ranks or []))}
        for name, p in plan.items()
    }
