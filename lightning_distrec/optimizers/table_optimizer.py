"""Optimizers of the tables alone, which the strategy gets as a class path and arguments."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import nn, optim
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_distrec.errors import ConfigError, OptimizerError, did_you_mean
from lightning_distrec.optimizers.param_groups import Shards, Weights, remove_from_groups
from lightning_distrec.option_values import check_choice

SHORT_NAMES: dict[str, type[optim.Optimizer]] = {"RowWiseAdagrad": RowWiseAdagrad}
"""Optimizers, next to those of torch.optim, that need no module in their class path."""
SCHEDULER_OPTIONS = ("interval", "frequency", "monitor", "strict", "name")


@dataclass(frozen=True)
class TableScheduler:
    """A learning rate scheduler of the tables' optimizer, and when Lightning steps it."""

    kind: type[Any]
    arguments: dict[str, Any]
    options: dict[str, Any]
    """Lightning's: interval, frequency, monitor, strict, name."""

    def build(self, optimizer: optim.Optimizer, number: int) -> LRSchedulerConfig:
        """Return the scheduler, as Lightning takes it from configure_optimizers. number: of the
        tables' optimizer."""
        scheduler = self.kind(optimizer, **self.arguments)
        # By this name LearningRateMonitor logs the rate.
        options = {"name": f"lr-table_optimizer{f'-{number}' if number else ''}"} | self.options
        return LRSchedulerConfig(
            scheduler, reduce_on_plateau=isinstance(scheduler, ReduceLROnPlateau), **options
        )


@dataclass(frozen=True)
class TableOptimizer:
    """What makes the optimizer of some tables."""

    kind: type[optim.Optimizer]
    arguments: dict[str, Any]
    scheduler: TableScheduler | None = None


@dataclass(frozen=True)
class OwnOptimizer:
    """An optimizer that the strategy has made for tables, which no optimizer of the user has."""

    optimizer: optim.Optimizer
    tables: list[str]
    """Full names."""
    schedulers: list[LRSchedulerConfig] = field(default_factory=list)


def parse_table_optimizer(option: str, value: Any) -> TableOptimizer:
    """Return the optimizer that a value describes: class_path, init_args, lr_scheduler.

    option: its name, for errors. Arguments may stand next to class_path too, where they take
    precedence: the command line puts them there. Raises ConfigError.
    """
    fields = _as_dict(option, value)
    scheduler = fields.pop("lr_scheduler", None)
    path = fields.pop("class_path")
    kind = _find_class(option, path, "torch.optim", optim.Optimizer, "an optimizer")
    arguments = _read_arguments(option, fields, kind, "params")
    # Errors of arguments show when the strategy is made, and not after hours in a queue.
    trial = _construct(option, kind, [nn.Parameter(torch.zeros(1, 1))], arguments)
    if scheduler is not None:
        scheduler = _parse_scheduler(f"{option}.lr_scheduler", scheduler, trial)
    return TableOptimizer(kind, arguments, scheduler)


def _parse_scheduler(option: str, value: Any, trial: optim.Optimizer) -> TableScheduler:
    fields = _as_dict(option, value)
    options = {name: fields.pop(name) for name in SCHEDULER_OPTIONS if fields.get(name) is not None}
    path = fields.pop("class_path")
    home = "torch.optim.lr_scheduler"
    kind = _find_class(option, path, home, LRScheduler, "a learning rate scheduler")
    arguments = _read_arguments(option, fields, kind, "optimizer")
    check_choice(f"{option}: interval", options.get("interval", "epoch"), ("step", "epoch"))
    if issubclass(kind, ReduceLROnPlateau) and "monitor" not in options:
        raise ConfigError(
            f"{option}: ReduceLROnPlateau needs monitor, the name of a metric that the module logs."
        )
    _construct(option, kind, trial, arguments)
    return TableScheduler(kind, arguments, options)


def _as_dict(option: str, value: Any) -> dict[str, Any]:
    value = value.as_dict() if hasattr(value, "as_dict") else value  # jsonargparse's Namespace
    if not isinstance(value, Mapping) or not isinstance(value.get("class_path"), str):
        raise ConfigError(
            f"{option}={value!r}: a dict with class_path is needed, for example {{'class_path': "
            "'torch.optim.Adagrad', 'init_args': {'lr': 0.02}}."
        )
    return dict(value)


def _find_class(option: str, path: str, home: str, base: type, description: str) -> type[Any]:
    """Return the class at a path, which may leave out the module `home`. Raises ConfigError: no
    subclass of `base`."""
    module, _, name = path.rpartition(".")
    try:
        kind = getattr(import_module(module or home), name, SHORT_NAMES.get(path))
    except ImportError as error:
        raise ConfigError(f"{option}: class_path={path!r} cannot be imported ({error}).") from error
    if not (isinstance(kind, type) and issubclass(kind, base)):
        candidates = [short for short, kind in SHORT_NAMES.items() if issubclass(kind, base)]
        for n, v in vars(import_module(home)).items():
            if isinstance(v, type) and issubclass(v, base):
                candidates.append(n)
        near = did_you_mean(name, candidates)
        raise ConfigError(
            f"{option}: class_path={path!r} is not {description}{near} Write {home}.NAME, or a "
            "path of your own."
        )
    return kind


def _read_arguments(option: str, fields: dict[str, Any], kind: type, first: str) -> dict[str, Any]:
    """Return the arguments of a class but its first. Raises ConfigError: it has no such
    argument."""
    arguments = dict(fields.pop("init_args", None) or {}) | fields
    # Names are checked before the class is called: its own TypeError could not suggest a near one.
    parameters = inspect.signature(kind).parameters
    if arguments.get(first) is None:  # the console writes the defaults of all arguments
        arguments.pop(first, None)
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    accepted = [name for name in parameters if name != first]
    for name in arguments:
        if name not in accepted and not takes_all:
            raise ConfigError(
                f"{option}: {kind.__name__} has no argument "
                f"{name!r}{did_you_mean(name, [*accepted, 'lr_scheduler'])} It takes "
                f"{', '.join(accepted)}."
            )
    return arguments


def _construct(option: str, kind: type, first: Any, arguments: dict[str, Any]) -> Any:
    try:
        return kind(first, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{option}: {kind.__name__} cannot be made with {arguments}: {error}"
        ) from error


def build_table_optimizers(
    parameters: Weights,
    optimizer_by_table: Mapping[str, TableOptimizer],
    optimizers: list[optim.Optimizer],
    automatic: bool,
    earlier: Shards,
) -> list[OwnOptimizer]:
    """Return the optimizers of tables alone; the tables leave the user's optimizers, in place.

    parameters: full name of a table -> its unsharded weight. automatic: whether Lightning steps the
    user's optimizer.
    earlier: see `find_param_groups`.
    Raises OptimizerError: it is not clear when to step them.
    """
    if not optimizer_by_table:
        return []
    _check_steps(optimizer_by_table, optimizers, automatic)
    # `find_param_groups`, which runs later, refuses a table that is in two optimizers.
    remove_from_groups(optimizers, {name: parameters[name] for name in optimizer_by_table}, earlier)
    # Compared one by one: arguments are dicts, which have no hash. Equal ones share an optimizer,
    # as in one group.
    kinds: list[TableOptimizer] = []
    for table_optimizer in optimizer_by_table.values():
        if table_optimizer not in kinds:
            kinds.append(table_optimizer)
    own_optimizers = []
    for number, table_optimizer in enumerate(kinds):
        names = [name for name, kind in optimizer_by_table.items() if kind == table_optimizer]
        optimizer = table_optimizer.kind(
            [parameters[name] for name in names], **table_optimizer.arguments
        )
        schedulers = []
        if table_optimizer.scheduler is not None:
            schedulers.append(table_optimizer.scheduler.build(optimizer, number))
        own_optimizers.append(OwnOptimizer(optimizer, names, schedulers))
    return own_optimizers


def _check_steps(
    optimizer_by_table: Mapping[str, TableOptimizer],
    optimizers: list[optim.Optimizer],
    automatic: bool,
) -> None:
    name = next(iter(optimizer_by_table))
    if len(optimizers) > 1:
        raise OptimizerError(
            f"table_optimizer for '{name}', and configure_optimizers returned {len(optimizers)} "
            "optimizers: the tables' steps with the one of configure_optimizers, and it is not "
            "clear with which. Give the tables to one of yours, without table_optimizer."
        )
    if any(isinstance(optimizer, optim.LBFGS) for optimizer in optimizers):
        raise OptimizerError(
            f"table_optimizer for '{name}': LBFGS runs several backward passes in a step, and the "
            "tables' optimizer would see the last one only. Use another optimizer for the other "
            "layers."
        )
    if not automatic and any(
        table_optimizer.scheduler is not None for table_optimizer in optimizer_by_table.values()
    ):
        raise OptimizerError(
            f"table_optimizer for '{name}' has an lr_scheduler, and under manual optimization "
            "Lightning steps none. Leave it out, and set the rate in "
            "trainer.strategy.table_optimizers[0].param_groups[0]['lr']."
        )
