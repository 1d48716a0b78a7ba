"""Opens a checkpoint on disk, of whichever form: for a run that loads it, and for tools outside of any run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning_distrec.checkpoint.difference import Difference, read_mark
from lightning_distrec.checkpoint.lazy_tensors import materialized
from lightning_distrec.checkpoint.load import CheckpointFile, CheckpointFolder, Loaded, StoredCheckpoint
from lightning_distrec.checkpoint.plain_state import map_nested, plain_optimizer_state
from lightning_distrec.errors import CheckpointError, MissingCheckpointError


def open_checkpoint(path: Path) -> StoredCheckpoint:
    """Return a checkpoint on disk, of whichever form. Raises CheckpointError: see `read_marker`; there is none."""
    if not path.is_dir():
        if not path.exists():
            raise MissingCheckpointError(f"there is no checkpoint {path}.")
        return CheckpointFile(path)
    folder = CheckpointFolder(path)
    mark = read_mark(path, folder.marker)
    return Difference(folder, mark) if mark is not None and mark.is_difference else folder


def read_contents(path: Path, pickles: bool = False) -> Loaded:
    """Read a checkpoint without its large tensors. Raises CheckpointError: see `StoredCheckpoint.contents`."""
    try:
        return open_checkpoint(path).contents(pickles)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:  # something in it is missing
        raise CheckpointError(
            f"{path} cannot be read, it is damaged or of another kind ({type(error).__name__}: {error})."
        ) from error


def verify(path: Path, on_progress: Callable[[int], None] = lambda num_bytes: None) -> list[str]:
    """Read all of a checkpoint, and return what has changed since it was written, by its checksums.

    Loading does not check them: it reads the rows that a rank needs, and a checksum covers a full chunk of a table.
    Of a difference its base is read too. on_progress: called with the number of bytes read. Up to 64 MiB of a folder
    are in memory at once. The metadata have no checksum; they are compared with the files when they are loaded.
    Raises CheckpointError: it cannot be read, or is a file without checksums.
    """
    return sorted(open_checkpoint(path).changed_bytes(on_progress))


def read_full(path: Path, with_optimizers: bool, pickles: bool = False) -> dict[str, Any]:
    """Read a checkpoint's folder into memory, as stock Lightning has it.

    with_optimizers: also read the optimizers' state, which is 0 to 2 times as large as the weights; without, it is left
    out. pickles: whether it may hold any types, whose code is run. Raises CheckpointError: see `load`.
    """
    checkpoint = read_contents(path, pickles).checkpoint
    states = checkpoint.pop("optimizer_states", None)
    if states is not None:
        checkpoint["optimizer_states"] = [plain_optimizer_state(state) for state in states] if with_optimizers else []

    def read(value: Any, place: str) -> Any:
        return map_nested(materialized(value), place, read)

    full: dict[str, Any] = read(checkpoint, "")
    return full
