"""Opens a checkpoint on disk, of whichever form: for a run that loads it, and for tools outside of
any run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_distrec.checkpoint.atomic_folder import read_marker
from lightning_distrec.checkpoint.checksums import ByteRange, changed_ranges
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


def verify(path: Path, on_progress: Callable[[int], None] = lambda num_bytes: None) -> list[str]:
    """Read all of a checkpoint, and its base, and return what has changed since it was written, by
    its checksums.

    on_progress: called with numbers of bytes. Raises CheckpointError: it cannot be read, or has no
    checksums.
    """
    if not (ranges := open_checkpoint(path).ranges()):
        raise CheckpointError(f"{path} has no checksums: only torch.save's newer format has.")
    return sorted(changed_ranges(ranges, on_progress=on_progress))


def check_bytes(path: Path | str, ranges: Sequence[ByteRange], ranks: Ranks | None = None) -> None:
    """Collective, alone without `ranks`. Read all bytes, each by one rank. Raises CheckpointError
    on all: damaged.

    Before anything is loaded: a rank reads some rows, a checksum covers a table, and a restart can
    still take another.
    """
    if changed := sorted(changed_ranges(ranges, ranks)):
        raise CheckpointError(
            f"{path} is damaged: {changed[0]} does not match its checksum. Use another checkpoint."
        )


def check_file(path: Path) -> None:
    """Raise CheckpointError: a file's bytes do not match its checksums; without these nothing is
    compared."""
    check_bytes(path, CheckpointFile(path).ranges())


def read_full(path: Path, with_optimizers: bool, pickles: bool = False) -> dict[str, Any]:
    """Read a checkpoint into memory, as stock Lightning has it. pickles: it may hold any types,
    whose code is run.

    Without optimizers, for a module that copies them, large tensors stay in the file until they are
    copied.
    """
    check_bytes(path, open_checkpoint(path).ranges())
    checkpoint = read_contents(path, pickles).checkpoint
    states = checkpoint.pop("optimizer_states", None)
    if states is not None:
        checkpoint["optimizer_states"] = (
            [plain_optimizer_state(state) for state in states] if with_optimizers else []
        )

    def read(value: Any, place: str) -> Any:
        if (
            not with_optimizers
            and isinstance(value, LazyTensor)
            and num_bytes(value) > UNREAD_BYTES
        ):
            return UnreadTensor.of_lazy(value)
        return map_nested(materialized(value), place, read)

    full: dict[str, Any] = read(checkpoint, "")
    return full
