"""Opens a checkpoint on disk, of whichever form: for a run that loads it, and for tools outside of
any run."""

from pathlib import Path
from typing import Any

from lightning_distrec.checkpoint.atomic_folder import read_marker
from lightning_distrec.checkpoint.difference import Difference, read_mark
from lightning_distrec.checkpoint.lazy_tensors import UnreadTensor, materialized
from lightning_distrec.checkpoint.load import (
    CheckpointFile,
    CheckpointFolder,
    Loaded,
    StoredCheckpoint,
)
from lightning_distrec.checkpoint.plain_state import map_nested, plain_optimizer_state
from lightning_distrec.chunks import LazyTensor, num_bytes
from lightning_distrec.errors import CheckpointError, MissingCheckpointError
from lightning_distrec.ranks import Ranks

UNREAD_BYTES = 16 * 2**20


def open_checkpoint(path: Path) -> StoredCheckpoint:
    """Return a checkpoint on disk, of whichever form. Raises CheckpointError: see `read_marker`;
    there is none."""
    if not path.is_dir():
        if not path.exists():
            raise MissingCheckpointError(f"there is no checkpoint {path}.")
        return CheckpointFile(path)
    marker = read_marker(path)
    mark = read_mark(path, marker)
    if mark is not None and mark.is_difference:
        return Difference(path, marker, mark)
    return CheckpointFolder(path, marker)


def read_contents(path: Path, pickles: bool = False) -> Loaded:
    """Read a checkpoint without its large tensors. Raises CheckpointError: see
    `StoredCheckpoint.contents`."""
    try:
        return open_checkpoint(path).contents(pickles)
    # something in it is missing
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read, it is damaged or of another kind ({type(error).__name__}: "
            f"{error})."
        ) from error


def verify(path: Path) -> list[str]:
    """Read all of a checkpoint, and its base, and return what has changed since it was written, by
    its checksums; of a single file, the first. Raises CheckpointError: it cannot be read, or has no
    checksums."""
    damage = open_checkpoint(path).find_damage()
    if damage is None:
        raise CheckpointError(f"{path} has no checksums: only torch.save's newer format has.")
    return damage


def check_bytes(path: Path | str, stored: StoredCheckpoint, ranks: Ranks | None = None) -> None:
    """Collective, alone without `ranks`. Read all bytes, each by one rank. Raises CheckpointError
    on all: damaged.

    Before anything is loaded: a rank reads some rows, a checksum covers a table, and a restart can
    still take another.
    """
    damage = stored.find_damage(ranks)
    if damage:
        raise CheckpointError(
            f"{path} is damaged: {damage[0]} does not match its checksum. Use another checkpoint."
        )


def check_file(path: Path) -> None:
    """Raise CheckpointError: a file's bytes do not match its checksums; without these nothing is
    compared."""
    check_bytes(path, CheckpointFile(path))


def read_full(path: Path, with_optimizers: bool, pickles: bool = False) -> dict[str, Any]:
    """Read a checkpoint into memory, as stock Lightning has it. pickles: it may hold any types,
    whose code is run.

    Without optimizers, for a module that copies them, large tensors stay in the file until they are
    copied.
    """
    check_bytes(path, open_checkpoint(path))
    checkpoint = read_contents(path, pickles).checkpoint
    states = checkpoint.pop("optimizer_states", None)
    if states is not None:
        used = states if with_optimizers else []
        checkpoint["optimizer_states"] = list(map(plain_optimizer_state, used))

    def read(leaf: Any, place: str) -> Any:
        is_lazy = isinstance(leaf, LazyTensor)
        if is_lazy and not with_optimizers and num_bytes(leaf) > UNREAD_BYTES:
            return UnreadTensor.of_lazy(leaf)
        return materialized(leaf)

    full: dict[str, Any] = map_nested(checkpoint, read)
    return full
