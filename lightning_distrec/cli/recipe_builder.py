"""Builds the module, data and callbacks of a recipe's YAML without a Trainer, for `advise` and `plan`."""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI

from lightning_distrec.errors import ConfigError


class RecipeBuilder(LightningCLI):
    """Parses what `fit` parses, and builds the module, its data and its callbacks."""

    on_meta = False
    """Whether the module is built on the meta device."""
    datamodule: LightningDataModule | None
    settings: Any
    """The Trainer's arguments, as plain values."""

    def before_instantiate_classes(self) -> None:
        trainer = self.config.fit.trainer
        self.settings = SimpleNamespace(**vars(trainer))
        trainer.logger, trainer.strategy = False, "auto"

    def instantiate_classes(self) -> None:
        with torch.device("meta") if self.on_meta else nullcontext():
            super().instantiate_classes()

    def instantiate_trainer(self, **_: Any) -> Any:
        # A Trainer would choose devices and start loggers; LightningCLI calls nothing but its `fit`.
        self.settings.callbacks = self.config_init.fit.trainer.callbacks or []
        return SimpleNamespace(fit=lambda **_: None)


class MetaRecipeBuilder(RecipeBuilder):
    """Builds the module on the meta device, where it takes no memory."""

    on_meta = True


Builder = TypeVar("Builder", bound=RecipeBuilder)


def build_recipe(configs: Sequence[str], builder: type[Builder]) -> Builder:
    """Return a builder that has built what the YAML files describe. Raises SystemExit: LightningCLI rejects them."""
    arguments = [argument for config in configs for argument in ("--config", config)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*LightningCLI's args parameter")
        return builder(
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_callback=None,
            parser_kwargs={"default_env": True},
            args=["fit", *arguments],
        )


def full_precision_name(precision: Any) -> str:
    """Return the full name of `Trainer(precision=)`, as the Trainer itself resolves it."""
    short = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}
    return short.get(str(precision or "32-true"), str(precision or "32-true"))


def is_on_gpu(accelerator: Any) -> bool:
    """Return whether `Trainer(accelerator=)` would use GPUs on this machine."""
    if accelerator == "auto":
        return torch.cuda.is_available()
    return accelerator in ("gpu", "cuda")


def count_devices(devices: Any, device: str) -> int:
    """Return the number of devices per node that `Trainer(devices=)` selects. Raises ConfigError: no GPU."""
    if isinstance(devices, list):
        return len(devices)
    if str(devices).isdecimal() and int(devices):
        return int(devices)
    if isinstance(devices, str) and "," in devices:
        return len([device for device in devices.split(",") if device.strip()])
    if device == "cpu":
        return 1
    if not torch.cuda.is_available():
        raise ConfigError(f"trainer.devices={devices!r}: there is no GPU on this machine to count. Set --devices 8.")
    return torch.cuda.device_count()
