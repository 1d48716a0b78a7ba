"""What set-up gets from the strategy: its options about tables, and the run of a module on its
ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr

from lightning_distrec._compat.lightning import given_train_loaders
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import ConfigError
from lightning_distrec.optimizers.table_optimizer import parse_table_optimizer
from lightning_distrec.option_values import plain_fields
from lightning_distrec.prefetch.loaders import loaders_in
from lightning_distrec.sharding.lookup.lookup_setup import CheckIds
from lightning_distrec.sharding.plain_embeddings import Conversion
from lightning_distrec.sharding.planning.sharding_plan import Origin
from lightning_distrec.sharding.planning.table_options import PlanningOptions, TableOptions
from lightning_distrec.sharding.sharders import QuantizedComms
from lightning_distrec.sharding.sharding_groups import (
    NodeLayout,
    ShardingGroupOptions,
    ShardingGroups,
)
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
        for name, options in (
            self.table_options.items() if isinstance(self.table_options, Mapping) else ()
        ):
            optimizer = (
                options.get("optimizer")
                if isinstance(options, Mapping)
                else getattr(options, "optimizer", None)
            )
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
            if is_size(size := getattr(source, "batch_size", None)):
                return replace(
                    settings, batch_size_per_rank=size, batch_size_origin="of the loader"
                )
    if lightning_hasattr(module, "batch_size") and is_size(
        size := lightning_getattr(module, "batch_size")
    ):
        return replace(
            settings,
            batch_size_per_rank=size,
            batch_size_origin="batch_size of the data or the module",
        )
    return settings


def is_size(value: Any) -> bool:
    """Whether this is a batch size."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value > 0)
