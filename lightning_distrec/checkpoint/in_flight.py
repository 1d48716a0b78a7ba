"""The checkpoints that threads of this process are writing, by their paths."""

from pathlib import Path
from threading import Thread

from lightning_distrec.checkpoint.atomic_folder import is_checkpoint

writing: dict[Path, Thread] = {}


def wait_for_checkpoint(path: Path) -> bool:
    """Return whether there is a complete checkpoint, a file or a folder; where one is being written, once it is."""
    if (thread := writing.get(path.absolute())) is not None:
        thread.join()
    return is_checkpoint(path)
