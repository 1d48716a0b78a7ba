"""The commands `advise` and `plan`: which strategy suits the module of a recipe's YAML, and a dry
run of its tables.

`advise` runs one batch; `plan` builds the module on the meta device. Nothing is trained."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace

from lightning_distrec._compat import hide_upstream_deprecations
from lightning_distrec.advice import dry_run_report, strategy_advice
from lightning_distrec.advice.dry_job import (
    DryJob,
    count_ids_in_data,
    dry_module,
    locate_error,
    training_loaders,
    with_counts,
)
from lightning_distrec.advice.dry_run import DryRun, dry_run
from lightning_distrec.advice.parameter_sizes import Job, MeasuredStep, measure_step
from lightning_distrec.advice.strategy_advice import Advice, Link, advise, print_advice
from lightning_distrec.cli.command_line import EXIT_NEGATIVE, EXIT_OK, check_options, console
from lightning_distrec.cli.lightning_cli import (
    MetaRecipeBuilder,
    RecipeBuilder,
    build_recipe,
    count_devices,
    full_precision_name,
    is_on_gpu,
)
from lightning_distrec.errors import ConfigError, require
from lightning_distrec.observe.plan_page import write_page
from lightning_distrec.observe.plan_pictures import draw_plan
from lightning_distrec.option_values import check_choice
from lightning_distrec.sharding.meta_tables import tables_on_meta
from lightning_distrec.sharding.planning.bandwidths import NAMES, Bandwidth
from lightning_distrec.sharding.planning.plan_file import save_plan
from lightning_distrec.sharding.planning.topology import memory_bytes_per_rank
from lightning_distrec.strategies.tables.set_up_inputs import TableSettings, is_size
from lightning_distrec.strategies.torchrec import TorchRecShardedStrategy
from lightning_distrec.units import describe_error, parse_bandwidth, parse_bytes, quantity


def run_advise(options: Namespace) -> int:
    """Run the command and return its exit code."""
    advice = advise_on(options)
    if options.json:
        print(json.dumps(strategy_advice.as_json(advice), indent=1))
    else:
        print_advice(advice, console())
    return EXIT_OK


def advise_on(options: Namespace) -> Advice:
    """Return the advice for the job that the options describe. Raises ConfigError."""
    check_options(options, "advise", nodes=1, devices=1)
    memory = _parse_memory(options, "device_memory")
    hide_upstream_deprecations()
    bandwidths = _parse_bandwidths(options.bandwidth or [])
    recipe = build_recipe(options.config, MetaRecipeBuilder if options.meta else RecipeBuilder)
    trainer = recipe.settings
    trainer.precision = full_precision_name(trainer.precision)
    device = "cuda" if is_on_gpu(trainer.accelerator) else "cpu"
    num_nodes = options.nodes or int(trainer.num_nodes)
    ranks_per_node = options.devices or count_devices(trainer.devices, device)
    if memory is None and device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "advise: this machine has no GPU to read the memory from. Set --device-memory 80GB."
        )
    job = Job(
        num_ranks=num_nodes * ranks_per_node,
        num_nodes=num_nodes,
        memory_bytes=memory_bytes_per_rank(torch.device(device), ranks_per_node, memory),
        trainer=trainer,
        device_type=device,
    )
    name = "cross_node" if num_nodes > 1 else "intra_node"
    unused = bandwidths.keys() - {name}
    if unused:
        raise ConfigError(
            f"--bandwidth {min(unused)}: of {quantity(num_nodes, 'node')}, advise takes {name}."
        )
    link = Link(name, bandwidths[name].bytes_per_second) if bandwidths else None
    if options.no_batch:
        step = MeasuredStep(problem="no batch was read (--no-batch)")
    else:
        step = _measure_first_batch(recipe, trainer.precision)
    return advise(recipe.model, job, step, link)


def _measure_first_batch(recipe: RecipeBuilder, precision: str) -> MeasuredStep:
    """Run a step with the first training batch on the CPU, or say why that is not possible."""
    module = recipe.model
    try:
        batch = next(iter(training_loaders(module, recipe.datamodule)))
        # No Trainer calls the hook here.
        if not recipe.on_meta:
            module.configure_model()
    # Of any kind, as the user's code runs here: the advice is then without activations.
    except Exception as error:
        return MeasuredStep(problem=f"the first batch could not be read ({describe_error(error)})")
    return measure_step(module, batch, precision)


def run_plan(options: Namespace) -> int:
    """Run the command and return its exit code."""
    outcome = plan_ahead(options)
    if options.json:
        print(json.dumps(dry_run_report.as_json(outcome), indent=1))
    else:
        dry_run_report.print_dry_run(outcome, console())
    if outcome.plan is None and (options.html or options.save_plan):
        print("lightning-distrec: there is no plan, so no file was written.", file=sys.stderr)
    return EXIT_OK if outcome.fits else EXIT_NEGATIVE


class PlanRecipeBuilder(MetaRecipeBuilder):
    """Builds the strategy too, if the YAML gives it options, and no data unless it is to be looked
    at."""

    reads_data = False

    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        config = self.config.fit
        self.settings.batch_size = _find_batch_size(config.get("data"), config.get("model"))
        # Building the data may download it, or need its folder.
        if not self.reads_data:
            config.data = None
        # A strategy with options is built for them; one that is a name alone could be any of
        # Lightning's, for GPUs say.
        if isinstance(self.settings.strategy, Namespace) and self.settings.strategy.get(
            "class_path"
        ):
            config.trainer.strategy = self.settings.strategy

    def instantiate_classes(self) -> None:
        with tables_on_meta():
            super().instantiate_classes()

    def instantiate_trainer(self, **arguments: Any) -> Any:
        # `config_init` has the instances, where `settings` has the values that were parsed.
        self.settings.strategy_built = self.config_init.fit.trainer.strategy
        return super().instantiate_trainer(**arguments)


class DataRecipeBuilder(PlanRecipeBuilder):
    """Builds the data, too."""

    reads_data = True


def _find_batch_size(*parts: Any) -> int | None:
    """Return the argument `batch_size` of the first part of the YAML that has one."""
    for part in parts:
        arguments: Any = part.get("init_args") if isinstance(part, Namespace) else None
        if arguments is not None and is_size(arguments.get("batch_size")):
            return int(arguments["batch_size"])
    return None


def plan_ahead(options: Namespace) -> DryRun:
    """Return the dry run that the command line asks for, and write the files that it names."""
    # All options are checked before the module is built, which may take long.
    if options.html is not None:
        require("matplotlib", "plan --html")
    bandwidths = _parse_bandwidths(options.bandwidth or [])
    check_options(options, "plan", nodes=1, devices=1, batch_size=1, from_data=1)
    host_bytes = _parse_memory(options, "host_memory")
    memory = _parse_memory(options, "device_memory")
    hide_upstream_deprecations()
    recipe = _build_on_meta(
        options.config, PlanRecipeBuilder if options.from_data is None else DataRecipeBuilder
    )
    trainer = recipe.settings
    assumed = []
    trainer.precision = full_precision_name(trainer.precision)
    device = options.accelerator or ("cuda" if is_on_gpu(trainer.accelerator) else "cpu")
    if options.accelerator is None and trainer.accelerator == "auto":
        assumed.append(
            f"accelerator: auto is {device}, which this machine has; set --accelerator for another"
        )
    if trainer.precision == "16-mixed" and device == "cpu":
        trainer.precision = "bf16-mixed"  # as Lightning does
    strategy, notes = _choose_strategy(trainer)
    settings = _override_settings(strategy.table_settings, options, trainer.batch_size)
    num_nodes = options.nodes or int(trainer.num_nodes)
    on_node = options.devices or count_devices(trainer.devices, device)
    origin = "--device-memory" if memory is not None else "memory_bytes_per_rank"
    if memory is None and settings.memory_bytes_per_rank is None:
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "plan: this machine has no GPU to ask for its memory. Give it: --device-memory "
                "80GB."
            )
        origin = "this machine's"
    job = DryJob(
        num_nodes=num_nodes,
        ranks_on_node=on_node,
        device=torch.device(device),
        memory_bytes=memory
        or memory_bytes_per_rank(torch.device(device), on_node, settings.memory_bytes_per_rank),
        memory_origin=origin,
        host_bytes=host_bytes or 0,
        bandwidths=bandwidths,
        shards_dense=strategy.shards_dense,
        groups=settings.groups,
    )
    dry = dry_module(recipe.model, trainer, settings, job.device)
    if options.from_data is not None:
        dry = with_counts(
            dry, *count_ids_in_data(recipe.model, recipe.datamodule, options.from_data)
        )
    outcome = dry_run(dry, job, quick=options.quick)
    outcome = replace(outcome, assumed=[*notes, *assumed, *outcome.assumed])
    if outcome.plan is not None and options.html is not None:
        write_page(options.html, outcome.plan, draw_plan(outcome.plan))
    if outcome.plan is not None and options.save_plan is not None:
        Path(options.save_plan).absolute().parent.mkdir(parents=True, exist_ok=True)
        save_plan(options.save_plan, outcome.plan)
    return outcome


def _parse_memory(options: Namespace, name: str) -> int | None:
    if options[name] is None:
        return None
    return parse_bytes(options[name], f"--{name.replace('_', '-')} {options[name]!r}")


def _parse_bandwidths(texts: Sequence[str]) -> dict[str, Bandwidth]:
    bandwidths = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(
                f"--bandwidth {text}: a name and a value are needed, such as cross_node=25GB/s."
            )
        check_choice("--bandwidth", name, NAMES)
        number = parse_bandwidth(value, f"--bandwidth {text}")
        bandwidths[name] = Bandwidth(bytes_per_second=number, origin="--bandwidth")
    return bandwidths


def _build_on_meta(configs: Sequence[str], builder: type[PlanRecipeBuilder]) -> Any:
    try:
        return build_recipe(configs, builder)
    except Exception as error:
        # below jsonargparse's own error, which lists all types that a value might have had
        cause = error
        while isinstance(cause.__cause__, Exception) and not locate_error(cause):
            cause = cause.__cause__
        place = locate_error(cause)
        if not place:
            raise
        raise ConfigError(
            "plan: the module cannot be built on the meta device, where it takes no memory: "
            f"{place}{describe_error(cause)}. Give tensors whose values are read there "
            "device='cpu', or build them in a hook that runs later."
        ) from error


def _choose_strategy(trainer: Any) -> tuple[TorchRecShardedStrategy, list[str]]:
    """Return the YAML's strategy, or torchrec_sharded with its defaults and a line about that."""
    built = trainer.strategy_built
    if isinstance(built, TorchRecShardedStrategy):
        return built, []
    name = TorchRecShardedStrategy.strategy_name
    if trainer.strategy == name:
        return TorchRecShardedStrategy(), []
    kind = trainer.strategy if isinstance(trainer.strategy, str) else type(built).__name__
    return TorchRecShardedStrategy(), [
        f"the strategy is {kind}: the plan is for {name} with its defaults"
    ]


def _override_settings(
    settings: TableSettings, options: Namespace, yaml_batch_size: int | None
) -> TableSettings:
    """Return the strategy's settings, overridden by the command line."""
    planning = {}
    for name in ("reserve", "plan_file"):
        if options[name] is not None:
            planning[name] = options[name]
    settings = replace(settings, planning=replace(settings.planning, **planning))
    if options.batch_size:
        return replace(
            settings, batch_size_per_rank=options.batch_size, batch_size_origin="--batch-size"
        )
    if settings.batch_size_per_rank is None and yaml_batch_size is not None:
        return replace(
            settings,
            batch_size_per_rank=yaml_batch_size,
            batch_size_origin="batch_size of the YAML",
        )
    return settings
