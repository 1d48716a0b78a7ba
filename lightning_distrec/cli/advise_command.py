"""The command `advise`: which strategy suits the module of a recipe's YAML. It runs one batch; nothing is trained."""

import json
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_distrec._compat import hide_upstream_deprecations
from lightning_distrec.advice.strategy_advice import Advice, ChosenOptions, advise, as_json, print_advice, read_options
from lightning_distrec.callbacks.throughput import count_samples
from lightning_distrec.cli.command_line import EXIT_OK, check_options, console
from lightning_distrec.cli.lightning_cli import (
    MetaRecipeBuilder,
    RecipeBuilder,
    build_recipe,
    count_devices,
    full_precision_name,
    is_on_gpu,
)
from lightning_distrec.errors import ConfigError
from lightning_distrec.sharding.planning.topology import memory_bytes_per_rank
from lightning_distrec.strategies.estimates.dense_options import watched_layers
from lightning_distrec.strategies.estimates.module_sizes import Job
from lightning_distrec.strategies.estimates.step_profile import StepProfile, profile_step
from lightning_distrec.units import describe_error, parse_bytes


def run_advise(options: Namespace) -> int:
    """Run the command and return its exit code."""
    advice = advise_on(options)
    if options.json:
        print(json.dumps(as_json(advice), indent=1))
    else:
        print_advice(advice, console())
    return EXIT_OK


def advise_on(options: Namespace) -> Advice:
    """Return the advice for the job that the options describe. Raises ConfigError."""
    check_options(options, "advise", nodes=1, devices=1)
    memory = options.device_memory
    if memory is not None:
        memory = parse_bytes(memory, f"--device-memory {memory!r}")
    hide_upstream_deprecations()
    recipe = build_recipe(options.config, MetaRecipeBuilder if options.meta else RecipeBuilder)
    settings, precision = recipe.settings, full_precision_name(recipe.settings.precision)
    device = "cuda" if is_on_gpu(settings.accelerator) else "cpu"
    num_nodes = options.nodes or int(settings.num_nodes)
    ranks_per_node = options.devices or count_devices(settings.devices, device)
    if memory is None and device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("advise: this machine has no GPU to read the memory from. Set --device-memory 80GB.")
    memory_bytes = memory_bytes_per_rank(torch.device(device), ranks_per_node, memory)
    job = Job(num_ranks=num_nodes * ranks_per_node, num_nodes=num_nodes, memory_bytes=memory_bytes, precision=precision)
    strategy_options = read_options(settings.strategy)
    if options.no_batch:
        profile = StepProfile(notes=("no batch was read (--no-batch)",))
    else:
        profile = _profile_first_batch(recipe, precision, strategy_options)
    return advise(recipe.model, job, settings, device, profile, options=strategy_options)


def _profile_first_batch(recipe: RecipeBuilder, precision: str, options: ChosenOptions) -> StepProfile:
    """Run a step with the first training batch on the CPU. Where that fails, the profile has the reason."""
    module = recipe.model
    try:
        batch = _first_batch(module, recipe.datamodule)
        # No Trainer calls the hook here.
        if not recipe.on_meta:
            module.configure_model()
        layers = watched_layers(module, options.dense)
    # Of any kind, as the user's code runs here: the advice is then without activations.
    except Exception as error:
        reason = describe_error(error)
        return StepProfile(notes=(f"the first batch could not be read ({reason}), so activations are left out",))
    return profile_step(module, batch, count_samples(batch), precision, takes_times=True, layers=layers)


def _first_batch(module: LightningModule, data: LightningDataModule | None) -> Any:
    if data is not None:
        data.prepare_data()
        data.setup("fit")
        return next(iter(data.train_dataloader()))
    if not is_overridden("train_dataloader", module):
        raise ConfigError("there is neither a data module nor a train_dataloader in the module")
    return next(iter(module.train_dataloader()))
