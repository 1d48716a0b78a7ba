"""The commands `fit`, `validate`, `test` and `predict`: a LightningCLI over any module and data that a YAML names."""

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.cli import LightningCLI

from lightning_distrec.cli.output import EXIT_ERROR
from lightning_distrec.versions import find_installed, problem_with

LOGGER_PACKAGES = {
    "TensorBoardLogger": ("tensorboard", "tensorboardX"),
    "WandbLogger": ("wandb",),
    "MLFlowLogger": ("mlflow", "mlflow_skinny"),
    "CometLogger": ("comet_ml",),
    "NeptuneLogger": ("neptune",),
}
"""Lightning's loggers -> the packages of which they need one."""


class FitCLI(LightningCLI):
    """A LightningCLI that looks for the loggers' packages before it builds anything."""

    def before_instantiate_classes(self) -> None:
        """End with one line if a logger's package is missing: jsonargparse hides the reason in a long traceback."""
        if problem := missing_logger(self.config[self.subcommand].trainer.logger):
            print(f"lightning-distrec: {problem}", file=sys.stderr)
            raise SystemExit(EXIT_ERROR)


def missing_logger(logger: Any) -> str:
    """Return what is wrong with `trainer.logger`, as parsed: one, a list of them, a bool or None; "" if nothing is."""
    for one in logger if isinstance(logger, list) else [logger]:
        name = getattr(one, "class_path", "").rpartition(".")[2]
        packages = LOGGER_PACKAGES.get(name, ())
        if packages and not any(importlib.util.find_spec(package) for package in packages):
            return (
                f"trainer.logger: {name} needs the package {packages[0]}, which is not installed. "
                f"Run pip install {packages[0]}, or set another logger, such as CSVLogger."
            )
    return ""


def run(args: Sequence[str]) -> None:
    """Run a LightningCLI over the LightningModule and LightningDataModule that the YAML names by class_path.

    Every option can come from the environment too (PL_FIT__TRAINER__MAX_EPOCHS and so on).
    """
    try:
        FitCLI(
            subclass_mode_model=True,
            subclass_mode_data=True,
            # Lightning refuses to write its config twice into one folder; running a recipe twice must work.
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"default_env": True},
            args=None if list(args) == sys.argv[1:] else list(args),  # Lightning warns if it gets args and sys.argv
        )
    except SystemExit as end:
        # A class_path whose module imports torchrec is refused as a wrong value, without what to install.
        found = find_installed()
        if end.code == EXIT_ERROR and (not found.torchrec or not found.fbgemms):
            print(f"lightning-distrec: {problem_with(found)}", file=sys.stderr)
        raise
