"""Lightning's CheckpointIO: it has the files that are not on a local path, and all of them if the
user has set one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from lightning.pytorch.plugins import CheckpointIO, TorchCheckpointIO

from lightning_distrec.checkpoint.checkpoint_options import CheckpointOptions
from lightning_distrec.checkpoint.contents import check_bytes, open_checkpoint
from lightning_distrec.checkpoint.load import CheckpointFile, Loaded, StoredCheckpoint
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import CheckpointError, ConfigError, MissingCheckpointError


def is_plugin(io: CheckpointIO) -> bool:
    """Whether the user has set it."""
    # By exact type: a subclass of the user's may read and write in its own way.
    return type(io) is not TorchCheckpointIO


def is_elsewhere(path: str, io: CheckpointIO) -> bool:
    """Whether the CheckpointIO writes and removes a checkpoint: the path is no local one, or the
    user has set it."""
    return "://" in path or is_plugin(io)


def open_stored(path: str | Path, io: CheckpointIO) -> StoredCheckpoint:
    """Return a checkpoint from where it is. Raises CheckpointError: see `open_checkpoint`."""
    # A folder is ours even with a plugin, which writes files only.
    if not is_elsewhere(str(path), io) or Path(path).is_dir():
        return open_checkpoint(Path(path))
    return CheckpointFile(Path(path), partial(_read_with, io, path))


def read_checked(
    open_it: Callable[[], StoredCheckpoint],
    path: str | Path,
    ranks: Consensus,
    pickles: bool,
    is_checked: bool = False,
) -> Loaded:
    """Collective. Return a checkpoint whose bytes match their checksums. Raises CheckpointError on
    all ranks.

    is_checked: whether they were compared before.
    """

    stored = ranks.all_or_none("loading a checkpoint", open_it)
    if not is_checked:
        check_bytes(path, stored, ranks)
    load = partial(stored.load, ranks.rank, ranks.num_ranks, pickles)
    return ranks.all_or_none("loading a checkpoint", load)


def _read_with(io: CheckpointIO, path: str | Path, pickles: bool) -> object:
    try:
        return io.load_checkpoint(path, weights_only=not pickles)
    except FileNotFoundError:
        raise MissingCheckpointError(f"there is no checkpoint {path}.") from None
    except Exception as error:  # of any file system, or plugin
        raise CheckpointError(f"{type(io).__name__} cannot read {path}: {error}") from error


def refuse_checkpoint_io(options: CheckpointOptions, io: CheckpointIO) -> None:
    """Raise ConfigError where a CheckpointIO plugin would be ignored."""
    if not is_plugin(io):
        return
    for setting in ("distributed", "async_save", "incremental"):
        if getattr(options, setting):
            value = "{...}" if setting == "incremental" else "True"
            raise ConfigError(
                f"plugins={type(io).__name__}: it writes one file, and checkpoint={{'{setting}': "
                f"{value}}} goes to the file system directly. Set checkpoint={{'distributed': "
                "False}, or checkpoint={'async_save': True} alone."
            )


def refuse_folder(path: str, storage_options: Any) -> NoReturn:
    """Raise ConfigError: a CheckpointIO is to write a folder, or in the background."""
    if storage_options is not None:
        setting = "checkpoint={'distributed': False}, without async_save"
        raise ConfigError(f"storage_options belong to a CheckpointIO. Set {setting}, to use one.")
    raise ConfigError(
        f"{path}: folders that all ranks write, and files that are written in the background, need "
        "a file system. Set dirpath to a folder on one, or checkpoint={'distributed': False}, "
        "without async_save."
    )
