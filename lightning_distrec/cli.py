"""The console script `lightning-distrec`: fit, validate, test and predict from a YAML recipe."""

import os
import sys
from collections.abc import Sequence

from lightning.pytorch.cli import LightningCLI

import lightning_distrec  # noqa: F401  registers the strategies


def main(args: Sequence[str] | None = None) -> None:
    """Run a LightningCLI over any LightningModule and LightningDataModule, named in YAML by class_path.

    args: the command line, sys.argv's where None. The working directory is importable, so that
    `class_path: recipes.movielens_dlrm.model.ClickModel` is found where the recipe is started.
    Every option can come from the environment too (PL_FIT__TRAINER__MAX_EPOCHS and the like).
    """
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    LightningCLI(
        subclass_mode_model=True,
        subclass_mode_data=True,
        # Lightning refuses to run twice in a folder; a second run of a recipe must not surprise anyone.
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"default_env": True},
        args=None if args is None else list(args),
    )


if __name__ == "__main__":
    main()
