"""Writes the sharding plan of a fit as a page, and its figures to the loggers."""

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
    """Writes the sharding plan and its costs when a fit begins: plan.html, and figures for the loggers.

    Loggers that accept images (TensorBoard, Weights & Biases) get the figures; without such a logger they are files
    next to the page. Rank 0 writes, which delays the first step by a few seconds. Figures need matplotlib; without it
    the page has its tables only.

    Args:
        path: the folder; None: that of the first logger, or the Trainer's default_root_dir.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__()
        self._path = path

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise ConfigError on every rank if the folder is not a local one."""
        folder = self._path or next((logger.save_dir for logger in trainer.loggers if logger.save_dir), None)
        folder = str(folder or trainer.default_root_dir)
        if "://" in folder:
            raise ConfigError(f"PlanLogger: '{folder}' is not a local folder. Set PlanLogger(path=...).")
        if importlib.util.find_spec("matplotlib") is None:
            rank_zero_warn(
                "PlanLogger: matplotlib is not installed, so plan.html will have no figures, and the loggers get none. "
                "Run pip install matplotlib."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the plan on rank 0. Raises ConfigError: the folder is not writable."""
        trial = trainer.fast_dev_run  # type: ignore[attr-defined]  # set where Lightning's types do not look
        if trial or not trainer.is_global_zero:
            return
        setup = getattr(trainer.strategy, "run_tables", None)  # TorchRecShardedStrategy's
        if setup is None:
            rank_zero_warn(
                "PlanLogger: no tables are sharded, so there is no plan to write. Use "
                "strategy='torchrec_sharded', or remove PlanLogger from the Trainer's callbacks."
            )
            return
        image_loggers = [logger for logger in trainer.loggers if _accepts_images(logger)]
        folder = Path(self._path or _folder_of(trainer))
        try:
            pictures = setup.write_plan(folder, picture_files=not image_loggers)
        except OSError as error:
            raise ConfigError(
                f"PlanLogger cannot write to '{folder}': {error}. Set another path, or remove PlanLogger from the "
                "Trainer's callbacks."
            ) from error
        for logger in image_loggers:
            for name, data in pictures.items():
                _log_image(logger, f"plan/{name}", _pixels(data), trainer.global_step)
        rank_zero_info(f"PlanLogger: wrote the sharding plan to {folder / 'plan.html'}.")


def _folder_of(trainer: Trainer) -> str:
    """Return the folder that loggers write to. Trainer.log_dir is a collective, and this runs on one rank only."""
    for logger in trainer.loggers:
        if folder := logger.log_dir or logger.save_dir:
            return str(folder)
    return str(trainer.default_root_dir)


def _accepts_images(logger: Logger) -> bool:
    return isinstance(logger, TensorBoardLogger) or callable(getattr(logger, "log_image", None))


def _log_image(logger: Any, name: str, pixels: Any, step: int) -> None:
    if isinstance(logger, TensorBoardLogger):
        logger.experiment.add_image(name, pixels, global_step=step, dataformats="HWC")
    else:
        logger.log_image(key=name, images=[pixels])


def _pixels(png: bytes) -> Any:
    """Return the pixels of a figure, (height, width, 3) bytes."""
    from matplotlib.image import imread

    return np.rint(imread(io.BytesIO(png), format="png")[..., :3] * 255).astype(np.uint8)
