"""Private names of Lightning's command line."""

from typing import Any

from lightning.pytorch.cli import LightningCLI


class PlainCheckpointCLI(LightningCLI):
    """A LightningCLI that leaves the hyperparameters of checkpoints to a method of ours."""

    # Source: lightning/pytorch/cli.py, LightningCLI.__init__. It lays the hyperparameters of a file over the command
    # line, and those of a folder nowhere. Can go when Lightning lets what was set win.
    def _parse_ckpt_path(self) -> None:
        if self.config.get("subcommand"):
            self.read_hyperparameters(self.config[self.config.subcommand].get("ckpt_path"))

    def read_hyperparameters(self, checkpoint: Any) -> None:
        """Take what a checkpoint, a path or None, says of the module. Called when all else is parsed."""
