"""What set-up starts from, the options and the run, and what it completes: a record per table."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr
from torch.optim import Optimizer

from lightning_distrec._compat.lightning import given_train_loaders
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import ConfigError
from lightning_distrec.optimizers.table_optimizer import OwnOptimizer, parse_table_optimizer
from lightning_distrec.optimizers.translation import TableUpdate, frozen
from lightning_distrec.option_values import plain_fields
from lightning_distrec.prefetch.loaders import loaders_in
from lightning_distrec.sharding.lookup.lookup_setup import CheckIds
from lightning_distrec.sharding.plain_embeddings import Conversion
from lightning_distrec.sharding.planning.constraints import TableConstraints
from lightning_distrec.sharding.planning.sharding_plan import Origin
from lightning_distrec.sharding.planning.table_options import PlanningOptions, TableOptions
from lightning_distrec.sharding.sharders import QuantizedComms
from lightning_distrec.sharding.sharding_groups import (
    NodeLayout,
    ShardingGroupOptions,
    ShardingGroups,
)
from lightning_distrec.sharding.tables import Table
from lightning_distrec.strategies.data_parallel.losses import LossReduction
from lightning_distrec.strategies.run.precision import output_dtype

ASSUMED_BATCH_SIZE = 512
"""torchrec's own, where no batch size is known."""


@dataclass(frozen=True, kw_only=True)
class TableSettings:
    """The strategy's options about tables."""

    default_options: TableOptions
    conversion: Conversion
    table_options: Mapping[str, Any]
    check_ids: CheckIds
    comms: QuantizedComms
    loss_reduction: LossReduction
    memory_bytes_per_rank: int | None
    batch_size_per_rank: int | None
    """None: not set, and not found."""
    batch_size_origin: str = "batch_size_per_rank"
    planning: PlanningOptions
    groups: ShardingGroupOptions = field(default_factory=ShardingGroupOptions)

    def __post_init__(self) -> None:
        plain_fields(self)
        if self.default_options.optimizer is not None:
            parse_table_optimizer("table_optimizer", self.default_options.optimizer)
        # Here, so that a typing error is reported when the strategy is made, before any rank plans.
        given = self.table_options if isinstance(self.table_options, Mapping) else {}
        for name, options in given.items():
            optimizer = getattr(options, "optimizer", None)
            if isinstance(options, Mapping):
                optimizer = options.get("optimizer")
            if optimizer is not None:
                parse_table_optimizer(f"tables[{name!r}].optimizer", optimizer)
        if self.batch_size_per_rank is not None and self.batch_size_per_rank <= 0:
            raise ConfigError(f"batch_size_per_rank={self.batch_size_per_rank}: must be above 0.")

    @property
    def batch_size(self) -> int:
        """Examples per rank and step that plans are made for."""
        return self.batch_size_per_rank or ASSUMED_BATCH_SIZE

    @property
    def batch_size_in_words(self) -> Origin:
        """A quantity, its value, and where the value came from."""
        origin = "assumed" if self.batch_size_per_rank is None else self.batch_size_origin
        return ("examples per rank", f"{self.batch_size:,}", origin)


@dataclass(frozen=True, kw_only=True)
class SetUpInputs:
    """One run, as this rank sees it."""

    trainer: Trainer
    module: LightningModule
    settings: TableSettings
    consensus: Consensus
    device: torch.device
    layout: NodeLayout
    """Of all ranks."""
    groups: ShardingGroups
    shards_dense: bool
    """Whether layers without tables are sharded too."""

    @cached_property
    def output_dtype(self) -> torch.dtype | None:
        """The type of looked up rows; None for the kernels' own. Raises UnsupportedError: there is
        no such kernel."""
        return output_dtype(str(self.trainer.precision))

    @cached_property
    def group_layout(self) -> NodeLayout:
        """Of the ranks among which tables are sharded; plans are made for these. Raises
        ConfigError."""
        return self.layout.group_layout(self.groups.size)

    @property
    def fits(self) -> bool:
        """Whether it is a fit, in which tables are updated."""
        return self.trainer.state.fn == TrainerFn.FITTING


@dataclass(kw_only=True)
class TableRecord:
    """One table of a run: found, with its options; then its update, and what a plan may do."""

    table: Table
    options: TableOptions
    read_in: str = ""
    """Where the module reads its weight, which is not gathered."""
    update: TableUpdate = frozen("evaluation only")
    in_backward: Optimizer | None = None
    """Its optimizer by apply_optimizer_in_backward."""
    constraints: TableConstraints | None = None

    @property
    def name(self) -> str:
        """The table's full name."""
        return self.table.full_name


@dataclass(kw_only=True)
class Decisions:
    """What is decided about the tables of an unsharded module, step by step."""

    records: list[TableRecord]
    """The tables to shard."""
    left_alone: dict[str, str]
    """Path -> reason, of modules that hold tables and are not sharded."""
    replicated: set[str]
    """Collections that stay ordinary layers, because their tables have replicated=True."""
    shipped: list[str]
    """Which modules ship options, for reports."""
    warnings: list[str] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    """Those of configure_optimizers."""
    lr_scheduler_configs: list[Any] = field(default_factory=list)
    own_optimizers: list[OwnOptimizer] = field(default_factory=list)
    """Those of tables alone, by table_optimizer."""

    @property
    def tables(self) -> list[Table]:
        """The tables to shard."""
        return [record.table for record in self.records]

    @property
    def updates(self) -> dict[str, TableUpdate]:
        """Full name of a table -> its update."""
        return {record.name: record.update for record in self.records}

    @property
    def constraints(self) -> dict[str, TableConstraints]:
        """Full name of a table -> what a plan may do with it."""
        return {r.name: r.constraints for r in self.records if r.constraints is not None}

    @property
    def with_assumed_ids(self) -> list[str]:
        """Full names of tables whose ids per example were neither counted nor set."""
        known = self.constraints
        # None and None
        return [n for n in known if known[n].pooling_factors is known[n].options.pooling_factor]

    @property
    def in_backward(self) -> dict[str, Optimizer]:
        """Full name of a table -> its optimizer by apply_optimizer_in_backward."""
        return {r.name: r.in_backward for r in self.records if r.in_backward is not None}

    @property
    def table_optimizers(self) -> list[Optimizer]:
        """Optimizers of tables alone, by table_optimizer."""
        return [own_optimizer.optimizer for own_optimizer in self.own_optimizers]

    def with_constraints(self, constraints: Mapping[str, TableConstraints]) -> "Decisions":
        """Return a copy with these constraints, by full name of a table."""
        records = [replace(r, constraints=constraints[r.name]) for r in self.records]
        return replace(self, records=records)


def with_batch_size(
    settings: TableSettings, trainer: Trainer, module: LightningModule
) -> TableSettings:
    """Return the settings with the batch size of the loader that fit was given, or else of
    `batch_size` attributes.

    Those of the datamodule, the module and their hparams, where Lightning's tuner looks too.
    Loaders that hooks make are not asked for: hooks run once more only where an option says so.
    """
    if settings.batch_size_per_rank is not None:
        return settings
    for loader in loaders_in(given_train_loaders(trainer)):
        for source in (loader, getattr(loader, "batch_sampler", None)):
            size = getattr(source, "batch_size", None)
            if is_size(size):
                return replace(
                    settings, batch_size_per_rank=size, batch_size_origin="of the loader"
                )
    if lightning_hasattr(module, "batch_size"):
        size = lightning_getattr(module, "batch_size")
        origin = "batch_size of the data or the module"
        if is_size(size):
            return replace(settings, batch_size_per_rank=size, batch_size_origin=origin)
    return settings


def is_size(value: Any) -> bool:
    """Whether this is a batch size."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value > 0)
