"""Refuses what comes from `pytorch_lightning`, whose classes `lightning.pytorch` does not know as its own."""

from collections.abc import Iterable
from typing import Any

from lightning_distrec.errors import ConfigError

CHANGE = (
    "lightning_distrec works with lightning.pytorch: write `import lightning.pytorch as pl` for "
    "`import pytorch_lightning as pl`, and `from lightning.pytorch...` for `from pytorch_lightning...`, in all files. "
    "For an installed package that imports it, write `import lightning_distrec.pytorch_lightning` before its import."
)


def refuse_other_namespace(instance: object) -> None:
    """Raises ConfigError: the class of a module, data module or callback is, or inherits from, pytorch_lightning's."""
    if any(kind.__module__.split(".")[0] == "pytorch_lightning" for kind in type(instance).__mro__):
        raise ConfigError(
            f"{type(instance).__name__} inherits from a class of pytorch_lightning; the Trainer is one of "
            f"lightning.pytorch, for which that is another class. {CHANGE}"
        )


def refuse_other_callbacks(callbacks: Iterable[Any]) -> None:
    """Raises ConfigError: a callback is one of pytorch_lightning's."""
    # Lightning calls its hooks, but treats it as none of its own: a ModelCheckpoint is neither called last nor found
    # by `trainer.checkpoint_callbacks`, and an average of weights would not be one of shards.
    for callback in callbacks:
        refuse_other_namespace(callback)
