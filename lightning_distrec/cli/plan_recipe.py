"""The dry run of a recipe's YAML, whose module is built on the meta device; nothing is trained."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace

from lightning_distrec._compat import hide_upstream_deprecations
from lightning_distrec.advice.dry_job import DryJob
from lightning_distrec.advice.dry_module import count_ids_in_data, dry_module, locate_error, with_counts
from lightning_distrec.advice.dry_run import DryRun, dry_run
from lightning_distrec.cli.recipe_builder import (
    MetaRecipeBuilder,
    build_recipe,
    count_devices,
    full_precision_name,
    is_on_gpu,
)
from lightning_distrec.errors import ConfigError, did_you_mean
from lightning_distrec.sharding.planning.bandwidths import NAMES, Bandwidth
from lightning_distrec.sharding.planning.plan_file import save_plan
from lightning_distrec.sharding.planning.report_page import write_page
from lightning_distrec.sharding.planning.topology import memory_bytes_per_rank
from lightning_distrec.sharding.tables import tables_on_meta
from lightning_distrec.strategies.tables.set_up_inputs import TableSettings, is_size
from lightning_distrec.strategies.torchrec import TorchRecShardedStrategy
from lightning_distrec.units import describe_error, parse_bandwidth, parse_bytes


class PlanRecipeBuilder(MetaRecipeBuilder):
    """Builds the strategy too, if the YAML gives it options, and no data unless it is to be looked at."""

    reads_data = False

    def before_instantiate_classes(self) -> None:
        super().before_instantiate_classes()
        config = self.config.fit
        self.settings.batch_size = _batch_size_of(config.get("data"), config.get("model"))
        if not self.reads_data:
            config.data = None
        if isinstance(self.settings.strategy, Namespace) and self.settings.strategy.get("class_path"):
            config.trainer.strategy = self.settings.strategy

    def instantiate_classes(self) -> None:
        with tables_on_meta():
            super().instantiate_classes()

    def instantiate_trainer(self, **given: Any) -> Any:
        self.settings.strategy_built = self.config_init.fit.trainer.strategy
        return super().instantiate_trainer(**given)


class DataRecipeBuilder(PlanRecipeBuilder):
    """Builds the data, too."""

    reads_data = True


def _batch_size_of(*parts: Any) -> int | None:
    """Return the argument `batch_size` of the first part of the YAML that has one."""
    for part in parts:
        arguments: Any = part.get("init_args") if isinstance(part, Namespace) else None
        if arguments is not None and is_size(size := arguments.get("batch_size")):
            return int(size)
    return None


def plan_ahead(given: Namespace) -> DryRun:
    """Return the dry run that the command line asks for, and write the files that it names.

    Raises ConfigError, and the strategy's own errors.
    """
    bandwidths = _bandwidths(given.bandwidth or [])
    _check(given)
    host_bytes = (
        0 if given.host_memory is None else parse_bytes(given.host_memory, f"--host-memory {given.host_memory!r}")
    )
    memory = None
    if given.device_memory is not None:
        memory = parse_bytes(given.device_memory, f"--device-memory {given.device_memory!r}")
    hide_upstream_deprecations()
    built = _built(given.config, PlanRecipeBuilder if given.from_data is None else DataRecipeBuilder)
    trainer, assumed = built.settings, []
    trainer.precision = full_precision_name(trainer.precision)
    device = given.accelerator or ("cuda" if is_on_gpu(trainer.accelerator) else "cpu")
    if given.accelerator is None and trainer.accelerator == "auto":
        assumed.append(f"accelerator: auto is {device}, which this machine has; set --accelerator for another")
    if trainer.precision == "16-mixed" and device == "cpu":
        trainer.precision = "bf16-mixed"  # as Lightning does
    strategy, of_strategy = _strategy(trainer)
    settings = _overridden(strategy.table_settings, given, trainer.batch_size)
    num_nodes = given.nodes or int(trainer.num_nodes)
    on_node = given.devices or count_devices(trainer.devices, device)
    origin = "--device-memory" if memory is not None else "memory_bytes_per_rank"
    if memory is None and settings.memory_bytes_per_rank is None:
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("plan: this machine has no GPU to ask for its memory. Give it: --device-memory 80GB.")
        origin = "this machine's"
    job = DryJob(
        num_nodes=num_nodes,
        ranks_on_node=on_node,
        device=torch.device(device),
        memory_bytes=memory or memory_bytes_per_rank(torch.device(device), on_node, settings.memory_bytes_per_rank),
        memory_origin=origin,
        host_bytes=host_bytes,
        bandwidths=bandwidths,
        shards_dense=strategy.shards_dense,
        groups=settings.groups,
    )
    dry = dry_module(built.model, trainer, settings, job.device)
    if given.from_data is not None:
        dry = with_counts(dry, *count_ids_in_data(built.model, built.datamodule, given.from_data))
    found = dry_run(dry, job, quick=given.quick)
    found = replace(found, assumed=[*of_strategy, *assumed, *found.assumed])
    if found.plan is not None and given.html is not None:
        write_page(given.html, found.plan)
    if found.plan is not None and given.save_plan is not None:
        Path(given.save_plan).absolute().parent.mkdir(parents=True, exist_ok=True)
        save_plan(given.save_plan, found.plan)
    return found


def _check(given: Namespace) -> None:
    if not given.config:
        raise ConfigError("plan: no --config is given. Name the YAML that `fit` would be given.")
    for name in ("nodes", "devices", "batch_size", "from_data"):
        if given[name] is not None and given[name] < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {given[name]}: must be at least 1.")


def _bandwidths(given: Sequence[str]) -> dict[str, Bandwidth]:
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--bandwidth {text}: a name and a value are needed, such as cross_node=25GB/s.")
        if name not in NAMES:
            near = did_you_mean(name, NAMES)
            raise ConfigError(
                f"--bandwidth {text}: there is no bandwidth {name!r}{near} Use one of {', '.join(NAMES)}."
            )
        number = parse_bandwidth(value, f"--bandwidth {text}")
        found[name] = Bandwidth(bytes_per_second=number, origin="--bandwidth")
    return found


def _built(configs: Sequence[str], builder: type[PlanRecipeBuilder]) -> Any:
    try:
        return build_recipe(configs, builder)
    except Exception as error:
        cause = error  # below jsonargparse's own error, which lists all types that a value might have had
        while isinstance(cause.__cause__, Exception) and not locate_error(cause):
            cause = cause.__cause__
        if not (place := locate_error(cause)):
            raise
        raise ConfigError(
            f"plan: the module cannot be built on the meta device, where it takes no memory: {place}"
            f"{describe_error(cause)}. Give tensors whose values are read there "
            "device='cpu', or build them in a hook that runs later."
        ) from error


def _strategy(trainer: Any) -> tuple[TorchRecShardedStrategy, list[str]]:
    """Return the YAML's strategy, or torchrec_sharded with its defaults and a line about that."""
    built = trainer.strategy_built
    if isinstance(built, TorchRecShardedStrategy):
        return built, []
    name = TorchRecShardedStrategy.strategy_name
    if trainer.strategy == name:
        return TorchRecShardedStrategy(), []
    kind = trainer.strategy if isinstance(trainer.strategy, str) else type(built).__name__
    return TorchRecShardedStrategy(), [f"the strategy is {kind}: the plan is for {name} with its defaults"]


def _overridden(settings: TableSettings, given: Namespace, of_yaml: int | None) -> TableSettings:
    """Return the strategy's settings, overridden by the command line. of_yaml: batch_size of its data or model."""
    planning = settings.planning
    if given.reserve is not None:
        planning = replace(planning, reserve=given.reserve)
    if given.plan_file is not None:
        planning = replace(planning, plan_file=given.plan_file)
    settings = replace(settings, planning=planning)
    if given.batch_size:
        return replace(settings, batch_size_per_rank=given.batch_size, batch_size_origin="--batch-size")
    if settings.batch_size_per_rank is None and of_yaml is not None:
        return replace(settings, batch_size_per_rank=of_yaml, batch_size_origin="batch_size of the YAML")
    return settings
