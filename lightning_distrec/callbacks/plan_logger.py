"""The plan of a fit as a page, and its pictures in the loggers."""

import importlib.util
import io
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_distrec.errors import ConfigError


class PlanLogger(Callback):
    """Writes where each table is, and what that costs, when a fit begins: plan.html, and pictures for the loggers.

    Loggers that take images (TensorBoard, Weights & Biases) get the pictures; without such a logger they are files
    beside the page. Rank 0 does it alone, while the others wait for its first step: a few seconds. Pictures need
    matplotlib; without it the page has its tables.

    Args:
        path: the folder; None takes that of the first logger, or the Trainer's default_root_dir.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__()
        self._path = path

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise ConfigError on every rank where the folder is none of this machine's."""
        folder = self._path or next((logger.save_dir for logger in trainer.loggers if logger.save_dir), None)
        folder = str(folder or trainer.default_root_dir)
        if "://" in folder:
            raise ConfigError(f"PlanLogger writes files, and '{folder}' is no folder of this machine. Give it a path.")
        if importlib.util.find_spec("matplotlib") is None:
            rank_zero_warn(
                "PlanLogger draws with matplotlib, which is not installed: plan.html will have no pictures, and the "
                "loggers get none. Install it (pip install matplotlib)."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Rank 0 writes. Raises ConfigError: it cannot write there."""
        trial = trainer.fast_dev_run  # type: ignore[attr-defined]  # set where Lightning's types do not look
        if trial or not trainer.is_global_zero:
            return
        setup = getattr(trainer.strategy, "table_setup", None)  # TorchRecShardedStrategy's
        if setup is None:
            rank_zero_warn(
                "PlanLogger: no tables are sharded, so that there is no plan to write. Use "
                "strategy='torchrec_sharded', or take PlanLogger out of the Trainer's callbacks."
            )
            return
        takers = [logger for logger in trainer.loggers if _takes_images(logger)]
        folder = Path(self._path or _folder_of(trainer))
        try:
            pictures = setup.write_plan(folder, picture_files=not takers)
        except OSError as error:
            raise ConfigError(
                f"PlanLogger cannot write into '{folder}': {error}. Give it another path, or take it out of the "
                "Trainer's callbacks."
            ) from error
        for logger in takers:
            for name, data in pictures.items():
                _log_image(logger, f"plan/{name}", _pixels(data), trainer.global_step)
        rank_zero_info(f"PlanLogger: where each table is, and what that costs: {folder / 'plan.html'}")


def _folder_of(trainer: Trainer) -> str:
    """Return where loggers write. Trainer.log_dir is a collective, and only one rank asks."""
    for logger in trainer.loggers:
        if folder := logger.log_dir or logger.save_dir:
            return str(folder)
    return str(trainer.default_root_dir)


def _takes_images(logger: Logger) -> bool:
    return isinstance(logger, TensorBoardLogger) or callable(getattr(logger, "log_image", None))


def _log_image(logger: Any, name: str, pixels: Any, step: int) -> None:
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_image(name, pixels, global_step=step, dataformats="HWC")
    else:
        logger.log_image(key=name, images=[pixels])


def _pixels(png: bytes) -> Any:
    """Return the (height, width, 3) bytes of a picture."""
    from matplotlib.image import imread

    return np.rint(imread(io.BytesIO(png), format="png")[..., :3] * 255).astype(np.uint8)
