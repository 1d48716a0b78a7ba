"""The console script `lightning-distrec`: fit, validate, test and predict from a YAML recipe, and our own commands."""

import os
import sys
from collections.abc import Sequence

from lightning_distrec import commands


def main(args: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code. args: the command line, sys.argv's where None."""
    args = sys.argv[1:] if args is None else list(args)
    if _is_for_lightning(args):
        run_lightning(args)
        return 0
    return commands.run(args)


def _is_for_lightning(args: Sequence[str]) -> bool:
    """Whether LightningCLI is to read the command line; what nobody knows is for ours, who tell all that there is."""
    if not args:
        return "PL_SUBCOMMAND" in os.environ
    return args[0] in commands.OF_LIGHTNING or (args[0].startswith("-") and args[0] not in ("-h", "--help"))


def run_lightning(args: Sequence[str]) -> None:
    """Run a LightningCLI over any LightningModule and LightningDataModule, named in YAML by class_path.

    The working directory is importable, so that `class_path: recipes.movielens_dlrm.model.ClickModel` is found where
    the recipe is started. Every option can come from the environment too (PL_FIT__TRAINER__MAX_EPOCHS and the like).
    """
    from lightning.pytorch.cli import LightningCLI  # slow to load, and our own commands have no use for it

    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    LightningCLI(
        subclass_mode_model=True,
        subclass_mode_data=True,
        # Lightning refuses to run twice in a folder; a second run of a recipe must not surprise anyone.
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"default_env": True},
        args=None if list(args) == sys.argv[1:] else list(args),  # Lightning warns where it is given both
    )


if __name__ == "__main__":
    sys.exit(main())
