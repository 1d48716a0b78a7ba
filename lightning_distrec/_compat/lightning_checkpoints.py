"""Private names of lightning: where a fit resumes, how checkpoints are read, and which ones loggers
upload."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeVar

import torch
from lightning.fabric.plugins.io import torch_io
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.core import saving
from lightning.pytorch.loggers import utilities
from lightning.pytorch.loggers.wandb import WandbLogger
from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector
from lightning_utilities.core.apply_func import apply_to_collection

from lightning_distrec._compat.patches import Patches

Kind = TypeVar("Kind", bound=type)


def resume_from(trainer: Any, find: Callable[[Any], str | None]) -> Patches:
    """Let a fit resume from the checkpoint that `find` returns for the user's ckpt_path; None: do
    as that says."""
    # Upstream resumes from the newest `hpc_ckpt_*` in the folder, whichever job wrote it, where it
    # detects Slurm. That is wrong for a new job in an old folder, and for jobs that restart without
    # Slurm. `_hpc_resume_path` is a property, which an instance cannot override, so the connector's
    # `__class__` is replaced by a subclass. Can go when Lightning asks the strategy or the
    # environment for the checkpoint to resume from.
    # Source: lightning/pytorch/trainer/connectors/checkpoint_connector.py, `_select_ckpt_path`,
    # which fit calls once.
    patches = Patches()
    connector = trainer._checkpoint_connector
    patches.replace_class(connector, _Resumes)
    patches.replace(connector, "find", find)
    patches.callback(connector.__dict__.pop, "chosen_path", None)
    patches.callback(connector.__dict__.pop, "has_restored", None)
    return patches


def resumed_path(trainer: Any) -> str | None:
    """Return the checkpoint that the fit in progress resumes from, also before it is loaded; None
    for none."""
    # Upstream sets `trainer.ckpt_path` when it loads, after set-up.
    path = getattr(trainer._checkpoint_connector, "chosen_path", None)
    return None if path is None else str(path)


def restore_before_fit_starts(trainer: Any) -> None:
    """Load module and callbacks now, between the strategy's set-up and on_fit_start."""
    # Upstream does so before the set-up; after on_fit_start for a strategy that restores after its
    # set-up, so that callbacks (StochasticWeightAveraging, BaseFinetuning) and modules see there
    # what they will not have. Can go when Lightning restores such strategies before on_fit_start.
    # Source: lightning/pytorch/trainer/trainer.py.
    connector = trainer._checkpoint_connector
    if isinstance(connector, _Resumes):
        connector.has_restored = False
        connector._restore_modules_and_callbacks(connector.chosen_path)
        connector.has_restored = True
        for callback in trainer.callbacks:
            if isinstance(callback, BaseFinetuning):
                # Else its on_fit_start would put others in the place of the groups that the
                # optimizers have by now.
                callback._restarting = False


def update_plateaus_of_this_epoch(trainer: Any) -> None:
    """Let the fit loop update ReduceLROnPlateau at the end of the epoch that it has resumed in."""
    # Upstream leaves them out there. The public setter sets it for the loops inside, too, and to
    # True where a fit is limited by steps.
    # Source: lightning/pytorch/loops/fit_loop.py, `on_advance_end`, which alone reads it after an
    # epoch has begun.
    trainer.fit_loop._restarting = False


def num_batches_stepped(trainer: Any) -> int:
    """Return the step that loggers get for the batch after the last one, wherever in a fit it is
    asked."""
    # Upstream counts a batch after the hooks at its end, and after a validation.
    # Source: lightning/pytorch/loops/training_epoch_loop.py, `on_advance_end`.
    loop = trainer.fit_loop.epoch_loop
    current = loop.batch_progress.current
    is_counted = current.completed == current.processed and not trainer.validating
    return int(loop._batches_that_stepped) + int(not is_counted and not loop._should_accumulate())


def continue_steps(trainer: Any, num_stepped: int) -> Patches:
    """Let a fit that resumes log its first batch as step `num_stepped`."""
    # Upstream guesses by its counters whether it had counted the last batch, and counts one where
    # it goes on with a validation, or with nothing, in place of a batch. Can go when its
    # checkpoints hold the number.
    # Source: as above, `reset` and `advance`.
    loop = trainer.fit_loop.epoch_loop
    patches = Patches()
    upstream_reset = loop.reset
    upstream_end = loop.on_advance_end

    def reset() -> None:
        del loop.__dict__["reset"]
        upstream_reset()
        loop._batches_that_stepped = num_stepped
        patches.replace(
            loop, "on_advance_end", partial(on_advance_end, loop.batch_progress.total.ready)
        )

    def on_advance_end(num_ready: int, data_fetcher: Any) -> None:
        del loop.__dict__["on_advance_end"]
        has_no_batch = loop.batch_progress.total.ready == num_ready
        loop._batches_that_stepped -= int(has_no_batch and not loop._should_accumulate())
        upstream_end(data_fetcher)

    patches.replace(loop, "reset", reset)
    return patches


class _Resumes(_CheckpointConnector):
    """What `resume_from` makes of a trainer's connector; at the top of the file, so that pickle
    finds it."""

    find: Callable[[Any], str | None] | None = None
    chosen_path: Any = None
    has_restored = False
    """Whether the fit in progress has loaded its checkpoint."""

    def _restore_modules_and_callbacks(self, *args: Any, **options: Any) -> None:
        if not self.has_restored:
            super()._restore_modules_and_callbacks(*args, **options)

    @property
    def _hpc_resume_path(self) -> str | None:
        return None

    def _select_ckpt_path(self, state_fn: Any, ckpt_path: Any, *args: Any, **options: Any) -> Any:
        requested = ckpt_path or (self._ckpt_path if self._user_managed else None)
        path: Any = self.find(requested) if state_fn == "fit" and self.find is not None else None
        if path is None:
            path = super()._select_ckpt_path(state_fn, ckpt_path, *args, **options)
        self.chosen_path = path
        return path

    def __getstate__(self) -> dict[str, Any]:
        # the next fit sets it again
        return {name: value for name, value in vars(self).items() if name != "find"}


def read_folders_too(
    is_folder: Callable[[Any], bool],
    read: Callable[[Any, bool, bool], dict[str, Any]],
    check: Callable[[Any], None],
    read_file: Callable[..., dict[str, Any]],
    for_module: Callable[[Any], Any],
) -> Patches:
    """Let Lightning read our folders wherever it reads a checkpoint's file, and our files with any
    hyperparameters.

    is_folder: whether a path is one. read: returns its content: optimizers' state too if the second
    argument is True; values of any type, whose code is run, if the third is: the user's
    weights_only=False. check: raises where a file is damaged, since torch compares no checksums.
    read_file: called with a path, Lightning's reader and its options, after that reader has refused
    a type.
    for_module: prepares what was read for load_from_checkpoint.
    """

    # Upstream opens the path as a file, in `load_from_checkpoint` and in the CheckpointIO of any
    # strategy. Both have their loader in the globals of their modules. Can go when Lightning lets a
    # checkpoint's format choose its reader.
    # Source: lightning/pytorch/core/saving.py, lightning/fabric/plugins/io/torch_io.py.
    def load_folders_too(load: Callable[..., Any], with_optimizers: bool) -> Callable[..., Any]:
        def load_any(
            path_or_url: Any, map_location: Any = None, weights_only: bool | None = None
        ) -> Any:
            if not is_folder(path_or_url):
                check(path_or_url)
                try:
                    return load(path_or_url, map_location=map_location, weights_only=weights_only)
                except UnpicklingError:
                    if weights_only is False:
                        raise
                    return read_file(path_or_url, load, map_location=map_location)
            checkpoint = read(path_or_url, with_optimizers, weights_only is False)
            # others say where what was on a GPU is to be
            if isinstance(map_location, (str, torch.device)):
                device = torch.device(map_location)
                checkpoint = apply_to_collection(
                    checkpoint,
                    torch.Tensor,
                    lambda tensor: tensor if tensor.device == device else tensor.to(device),
                )
            return checkpoint

        return load_any

    patches = Patches()
    load = load_folders_too(saving.pl_load, with_optimizers=False)
    patches.replace(saving, "pl_load", lambda *args, **options: for_module(load(*args, **options)))
    patches.replace(torch_io, "pl_load", load_folders_too(torch_io.pl_load, with_optimizers=True))
    return patches


def upload_folders_too(is_checkpoint: Callable[[Path], bool]) -> Patches:
    """Let loggers with log_model upload our folders wherever they upload a file.

    is_checkpoint: whether a path is a complete checkpoint, a file or a folder; it waits for one
    that is being written.
    """
    # Upstream keeps the paths whose `Path(path).is_file()` is True, so `Path` is replaced in its
    # module, which uses it for nothing else. MLflow's log_artifact and litlogger's Model take
    # folders; W&B's add_file does not. Can go when Lightning's loggers take folders.
    # Source: lightning/pytorch/loggers/utilities.py, `_scan_checkpoints`, which mlflow.py, wandb.py
    # and litlogger.py use; lightning/pytorch/loggers/wandb.py, `_scan_and_log_checkpoints`.
    scan = WandbLogger._scan_and_log_checkpoints

    # Path itself has no subclasses before Python 3.12.
    class FileOrFolder(type(Path())):  # type: ignore[misc]
        def is_file(self, **options: Any) -> bool:
            return is_checkpoint(Path(self))

    def scan_and_log(self: Any, checkpoint_callback: Any) -> None:
        wandb: Any = import_module("wandb")
        with Patches() as upload:
            # it is looked up for each checkpoint
            upload.replace(wandb, "Artifact", _takes_folders(wandb.Artifact))
            scan(self, checkpoint_callback)

    patches = Patches()
    patches.replace(utilities, "Path", FileOrFolder)
    patches.replace(WandbLogger, "_scan_and_log_checkpoints", scan_and_log)
    return patches


def _takes_folders(artifact: Any) -> Any:
    class Artifact(artifact):  # type: ignore[misc]
        def add_file(self, local_path: str, *args: Any, **options: Any) -> Any:
            add = super().add_dir if Path(local_path).is_dir() else super().add_file
            return add(local_path, *args, **options)

    return Artifact


def reads_hyperparameters(command_line: Kind) -> Kind:
    """Let a LightningCLI call its `read_hyperparameters` with the `ckpt_path`, when all else is
    parsed."""

    def parse(self: Any) -> None:
        if self.config.get("subcommand"):
            self.read_hyperparameters(self.config[self.config.subcommand].get("ckpt_path"))

    # Source: lightning/pytorch/cli.py, LightningCLI.__init__. Upstream lays the hyperparameters of
    # a file over the command line, and those of a folder nowhere. Can go when Lightning lets what
    # was set win.
    command_line._parse_ckpt_path = parse  # type: ignore[attr-defined]
    return command_line
