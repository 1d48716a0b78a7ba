"""The command `advise`: the module and data of a recipe's YAML are built, and no Trainer; nothing is trained."""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_distrec._compat.deprecations import hide_upstream_deprecations
from lightning_distrec.advice.advise import Advice, advise
from lightning_distrec.callbacks.throughput import count_samples
from lightning_distrec.errors import ConfigError
from lightning_distrec.sharding.planning.topology import memory_bytes_per_rank
from lightning_distrec.strategies.estimates.estimate import Job
from lightning_distrec.strategies.estimates.step_profile import StepProfile, profile_step
from lightning_distrec.units import parse_bytes


class BuildsOnly(LightningCLI):
    """Reads what `fit` reads, and builds the module, its data and its callbacks."""

    meta = False
    """Whether the module is built on the meta device."""
    datamodule: LightningDataModule | None
    settings: Any
    """The Trainer's, as plain values."""

    def before_instantiate_classes(self) -> None:
        trainer = self.config.fit.trainer
        self.settings = SimpleNamespace(**vars(trainer))
        trainer.logger, trainer.strategy = False, "auto"

    def instantiate_classes(self) -> None:
        with torch.device("meta") if self.meta else nullcontext():
            super().instantiate_classes()

    def instantiate_trainer(self, **_: Any) -> Any:
        self.settings.callbacks = self.config_init.fit.trainer.callbacks or []
        return SimpleNamespace(fit=lambda **_: None)


class BuildsOnMeta(BuildsOnly):
    """Builds the module without memory."""

    meta = True


Builder = TypeVar("Builder", bound=BuildsOnly)


def build(configs: Sequence[str], builder: type[Builder]) -> Builder:
    """Return what the YAML files say, built. Raises SystemExit: LightningCLI does not understand them."""
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


def advise_on(given: Namespace) -> Advice:
    """Return the advice that the command line asks for. Raises ConfigError."""
    for name in ("nodes", "devices"):
        if given[name] is not None and given[name] < 1:
            raise ConfigError(f"--{name} {given[name]}: must be at least 1.")
    if not given.config:
        raise ConfigError("advise: no --config is given. Name the YAML that `fit` would be given.")
    memory = given.device_memory
    if memory is not None:
        memory = parse_bytes(memory, f"--device-memory {memory!r}")
    hide_upstream_deprecations()
    built = build(given.config, BuildsOnMeta if given.meta else BuildsOnly)
    settings, precision = built.settings, full_precision_name(built.settings.precision)
    device = "cuda" if is_on_gpu(settings.accelerator) else "cpu"
    num_nodes = given.nodes or int(settings.num_nodes)
    on_node = given.devices or count_devices(settings.devices, device)
    if memory is None and device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("advise: there is no GPU here to ask for its memory. Say it: --device-memory 80GB.")
    memory_bytes = memory_bytes_per_rank(torch.device(device), on_node, memory)
    job = Job(num_ranks=num_nodes * on_node, num_nodes=num_nodes, memory_bytes=memory_bytes, precision=precision)
    profile = (
        StepProfile(notes=("no batch was looked at, as asked",)) if given.no_batch else _look_at_batch(built, precision)
    )
    return advise(built.model, job, settings, device, profile)


def full_precision_name(given: Any) -> str:
    """Return `Trainer(precision=)` as the Trainer itself would call it."""
    short = {"32": "32-true", "16": "16-mixed", "bf16": "bf16-mixed", "64": "64-true"}
    return short.get(str(given or "32-true"), str(given or "32-true"))


def is_on_gpu(accelerator: Any) -> bool:
    """Return whether `Trainer(accelerator=)` stands for GPUs here."""
    if accelerator == "auto":
        return torch.cuda.is_available()
    return accelerator in ("gpu", "cuda")


def count_devices(devices: Any, device: str) -> int:
    """Return how many devices of a node `Trainer(devices=)` stands for."""
    if isinstance(devices, list):
        return len(devices)
    if str(devices).isdecimal() and int(devices):
        return int(devices)
    if isinstance(devices, str) and "," in devices:
        return len([part for part in devices.split(",") if part.strip()])
    if device == "cpu":
        return 1
    if not torch.cuda.is_available():
        raise ConfigError(f"trainer.devices={devices!r}, and there is no GPU here to count. Say how many: --devices 8.")
    return torch.cuda.device_count()


def _look_at_batch(built: BuildsOnly, precision: str) -> StepProfile:
    """Run a step with the first batch of training, on the host. What cannot be had is said."""
    module = built.model
    try:
        batch = _first_batch(module, built.datamodule)
        if not built.meta:
            module.configure_model()
    except Exception as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return StepProfile(notes=(f"no batch could be looked at ({why}), so activations are left out",))
    return profile_step(module, batch, count_samples(batch), precision)


def _first_batch(module: LightningModule, data: LightningDataModule | None) -> Any:
    if data is not None:
        data.prepare_data()
        data.setup("fit")
        return next(iter(data.train_dataloader()))
    if not is_overridden("train_dataloader", module):
        raise ConfigError("neither a data module nor the module's own train_dataloader is there")
    return next(iter(module.train_dataloader()))
