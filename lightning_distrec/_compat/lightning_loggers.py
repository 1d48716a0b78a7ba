"""Private names of lightning: how its loggers find the checkpoints that they upload, and add them to an artifact."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def upload_folders_too(is_checkpoint: Callable[[Path], bool]) -> None:
    """Let loggers with log_model upload our folders wherever they upload a file. Once per process.

    is_checkpoint: whether a path is a complete checkpoint, a file or a folder; it waits for one that is being written.
    Upstream keeps the paths whose `Path(path).is_file()` is True, so `Path` is replaced in its module, which uses it
    for nothing else. MLflow's log_artifact and litlogger's Model take folders; W&B's add_file does not.
    Can go when Lightning's loggers take folders.
    Source: lightning/pytorch/loggers/utilities.py, `_scan_checkpoints`, which mlflow.py, wandb.py and litlogger.py use;
    lightning/pytorch/loggers/wandb.py, `_scan_and_log_checkpoints`.
    """
    from lightning.pytorch.loggers import utilities
    from lightning.pytorch.loggers.wandb import WandbLogger

    theirs = WandbLogger._scan_and_log_checkpoints
    if hasattr(theirs, "theirs"):
        return

    class FileOrFolder(type(Path())):  # type: ignore[misc]  # Path itself has no subclasses before Python 3.12
        def is_file(self, **options: Any) -> bool:
            return is_checkpoint(Path(self))

    def scan_and_log(self: Any, checkpoint_callback: Any) -> None:
        wandb: Any = import_module("wandb")
        of_wandb = wandb.Artifact
        wandb.Artifact = _takes_folders(of_wandb)  # it is looked up there for each checkpoint
        try:
            theirs(self, checkpoint_callback)
        finally:
            wandb.Artifact = of_wandb

    scan_and_log.theirs = theirs  # type: ignore[attr-defined]
    utilities.Path = FileOrFolder  # type: ignore[misc]
    WandbLogger._scan_and_log_checkpoints = scan_and_log  # type: ignore[method-assign]


def _takes_folders(of_wandb: Any) -> Any:
    class Artifact(of_wandb):  # type: ignore[misc]
        def add_file(self, local_path: str, *args: Any, **options: Any) -> Any:
            add = super().add_dir if Path(local_path).is_dir() else super().add_file
            return add(local_path, *args, **options)

    return Artifact
