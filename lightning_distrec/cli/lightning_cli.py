"""LightningCLI: `fit` and its like run it; `advise`, `plan` and `export` build a module by it, without a Trainer."""

import importlib.util
import sys
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI

from lightning_distrec.cli.command_line import EXIT_ERROR
from lightning_distrec.errors import ConfigError
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

    def instantiate_classes(self) -> None:
        """Build the module with tables without rows where its strategy makes them by ranks."""
        with tables_context(self.config[self.subcommand].trainer.strategy):
            super().instantiate_classes()


def tables_context(strategy: Any) -> AbstractContextManager[None]:
    name = strategy if isinstance(strategy, str) else getattr(strategy, "class_path", "")
    if name.rpartition(".")[2] not in ("torchrec_sharded", "TorchRecShardedStrategy"):
        return nullcontext()
    from lightning_distrec.sharding.meta_tables import meta_tables  # torchrec loads where it is needed only

    options = getattr(strategy, "init_args", None) or Namespace()
    return meta_tables(options.get("convert_embeddings", "auto"), options.get("min_rows", 100_000))


def missing_logger(logger: Any) -> str:
    """Return what is wrong with `trainer.logger`, as parsed: one, a list of them, a bool or None; "" if nothing is."""
    for config in logger if isinstance(logger, list) else [logger]:
        name = getattr(config, "class_path", "").rpartition(".")[2]
        packages = LOGGER_PACKAGES.get(name, ())
        if packages and not any(importlib.util.find_spec(package) for package in packages):
            return (
                f"trainer.logger: {name} needs the package {packages[0]}, which is not installed. "
                f"Run pip install {packages[0]}, or set another logger, such as CSVLogger."
            )
    return ""


def run_lightning(args: Sequence[str]) -> None:
    """Run a LightningCLI; options can come from the environment too (PL_FIT__TRAINER__MAX_EPOCHS and so on)."""
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
        installed = find_installed()
        if end.code == EXIT_ERROR and (not installed.torchrec or not installed.fbgemms):
            print(f"lightning-distrec: {problem_with(installed)}", file=sys.stderr)
        raise


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
        # A logger or a strategy may need packages, GPUs or a launcher that this machine does not have.
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
        # It warns of arguments next to those of sys.argv, which are another command's here.
        warnings.filterwarnings("ignore", ".*LightningCLI's args parameter")
        return builder(
            subclass_mode_model=True,
            subclass_mode_data=True,
            # Nothing runs that a saved config would describe.
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
    # "auto" is one process there: CPUAccelerator.auto_device_count.
    if device == "cpu":
        return 1
    if not torch.cuda.is_available():
        raise ConfigError(f"trainer.devices={devices!r}: there is no GPU on this machine to count. Set --devices 8.")
    return torch.cuda.device_count()
