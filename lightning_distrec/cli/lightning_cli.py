"""Builds the module of a YAML by LightningCLI, without a Trainer, for `advise`, `plan` and
`export`.

What jsonargparse says of a wrong value is the message of an error, which the console prints in one
block.
"""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from typing_extensions import override

from lightning_distrec.errors import ConfigError, MissingPackageError
from lightning_distrec.registration import register
from lightning_distrec.versions import find_installed, problem_with

register()  # YAMLs name our strategies


class CommandLineError(ConfigError):
    """A command line or a YAML is refused, alike on all ranks of a node."""


class OneBlockParser(LightningArgumentParser):
    """A parser that raises CommandLineError with jsonargparse's message, without the usage."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        # Parsers that jsonargparse makes for the arguments of a class; it adds the class to what
        # they raise.
        if not self.exit_on_error:
            super().error(message, ex)
        installed = find_installed()
        # A class_path whose module imports torchrec is refused as a wrong value, without what to
        # install.
        if not installed.torchrec or not installed.fbgemms:
            raise MissingPackageError(str(problem_with(installed))) from ex
        raise CommandLineError(message) from ex


class RecipeBuilder(LightningCLI):
    """Parses what `fit` parses, and builds the module, its data and its callbacks."""

    on_meta = False
    """Whether the module is built on the meta device."""
    datamodule: LightningDataModule | None
    settings: Any
    """The Trainer's arguments, as plain values."""

    def before_instantiate_classes(self) -> None:
        trainer = self.config.fit.trainer
        # A copy, from before the changes below.
        self.settings = SimpleNamespace(**vars(trainer))
        # A logger or a strategy may need packages, GPUs or a launcher that this machine does not
        # have.
        trainer.logger = False
        trainer.strategy = "auto"

    def instantiate_classes(self) -> None:
        with torch.device("meta") if self.on_meta else nullcontext():
            super().instantiate_classes()

    def instantiate_trainer(self, **_: Any) -> Any:
        # A Trainer would choose devices and start loggers; LightningCLI calls nothing but its
        # `fit`.
        self.settings.callbacks = self.config_init.fit.trainer.callbacks or []
        return SimpleNamespace(fit=lambda **_: None)


class MetaRecipeBuilder(RecipeBuilder):
    """Builds the module on the meta device, where it takes no memory."""

    on_meta = True


Builder = TypeVar("Builder", bound=RecipeBuilder)


def build_recipe(configs: Sequence[str], builder: type[Builder]) -> Builder:
    """Return a builder that has built what the YAML files describe. Raises ConfigError: they are
    rejected."""
    arguments = [argument for config in configs for argument in ("--config", config)]
    with warnings.catch_warnings():
        # It warns of arguments next to those of sys.argv, which are another command's here.
        warnings.filterwarnings("ignore", ".*LightningCLI's args parameter")
        return builder(
            subclass_mode_model=True,
            subclass_mode_data=True,
            # Nothing runs that a saved config would describe.
            save_config_callback=None,
            parser_kwargs={"default_env": True},
            parser_class=OneBlockParser,
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
    """Return the number of devices per node that `Trainer(devices=)` selects. Raises ConfigError:
    no GPU."""
    if isinstance(devices, list):
        return len(devices)
    if str(devices).isdecimal() and int(devices):
        return int(devices)
    if isinstance(devices, str) and "," in devices:
        return len([device for device in devices.split(",") if device.strip()])
    # "auto" is one process there: CPUAccelerator.auto_device_count.
    if device == "cpu":
        return 1
    if not torch.cuda.is_available():
        raise ConfigError(
            f"trainer.devices={devices!r}: there is no GPU on this machine to count. Set --devices "
            "8."
        )
    return torch.cuda.device_count()
