"""Keeps a checkpoint to plain types, which load without running code: numbers, text, tensors, lists, dicts.

Paths become text; but hyperparameters that are paths are left out, for code that gets text in place of one may fail.
"""

from importlib import import_module
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_distrec.checkpoint.plain_state import find_not_plain, refuse_not_plain, with_plain_types

HYPERPARAMETERS = {
    kind.CHECKPOINT_HYPER_PARAMS_KEY: kind.CHECKPOINT_HYPER_PARAMS_TYPE
    for kind in (LightningModule, LightningDataModule)
}
"""The keys of hyperparameters, and of their type where that is one of OmegaConf's."""


def drop_hyperparameters(checkpoint: dict[str, Any], warned: set[str]) -> None:
    """Drop hyperparameters that are not of plain types, with a warning for each that is not in `warned` yet.

    An OmegaConf container becomes the dict of its values.
    """
    for kind, kind_of_type in HYPERPARAMETERS.items():
        if kind not in checkpoint:
            continue
        if (container := checkpoint.pop(kind_of_type, None)) is not None:
            # Imported only here: it is no dependency, but must be there where Lightning has noted one of its types.
            checkpoint[kind] = import_module("omegaconf").OmegaConf.to_container(checkpoint[kind], resolve=True)
            if kind_of_type not in warned:
                rank_zero_warn(
                    f"the hyperparameters are a {container.__name__} of OmegaConf, and a dict in checkpoints, which "
                    "hold plain types only. load_from_checkpoint passes that dict: call OmegaConf.create on it."
                )
                warned.add(kind_of_type)
        values = checkpoint[kind]
        refused = [name for name, value in values.items() if find_not_plain(value) is not None]
        checkpoint[kind] = {name: value for name, value in values.items() if name not in refused}
        for name in sorted(set(refused) - warned):
            rank_zero_warn(
                f"the hyperparameter '{name}' is a {type(values[name]).__name__} and not in checkpoints, which hold "
                "plain types only. Pass it to load_from_checkpoint, leave it out of save_hyperparameters, or set "
                "checkpoint={'pickles': True} in the strategy."
            )
            warned.add(name)


def refuse_callbacks(trainer: Trainer) -> None:
    """Raise CheckpointError where a callback's state could not be saved, before the run starts.

    Checks only callbacks of the user: Lightning's have plain types, or copies of the whole model.
    """
    if trainer.state.fn != TrainerFn.FITTING or not trainer.checkpoint_callbacks:
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if not type(callback).__module__.startswith("lightning."):
            refuse_not_plain(
                with_plain_types(callback.state_dict()), f"the state_dict of {type(callback).__name__}: state"
            )
