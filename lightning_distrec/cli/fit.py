"""The commands `fit`, `validate`, `test` and `predict`: a LightningCLI over any module and data that a YAML names."""

import sys
from collections.abc import Sequence

from lightning.pytorch.cli import LightningCLI


def run(args: Sequence[str]) -> None:
    """Run a LightningCLI over the LightningModule and LightningDataModule that the YAML names by class_path.

    Every option can come from the environment too (PL_FIT__TRAINER__MAX_EPOCHS and so on).
    """
    LightningCLI(
        subclass_mode_model=True,
        subclass_mode_data=True,
        # Lightning refuses to write its config twice into one folder; running a recipe twice must work.
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"default_env": True},
        args=None if list(args) == sys.argv[1:] else list(args),  # Lightning warns if it gets args and sys.argv
    )
