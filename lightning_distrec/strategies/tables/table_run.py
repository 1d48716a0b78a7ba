"""What tables are set up in: a run of a module on its ranks."""

from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.sharding.planning.topology import NodeLayout
from lightning_distrec.strategies.tables.decisions import TableSettings


@dataclass(frozen=True, kw_only=True)
class TableRun:
    """One run, as this rank sees it."""

    trainer: Trainer
    module: LightningModule
    settings: TableSettings
    consensus: Consensus
    device: torch.device
    places: NodeLayout
    """Which ranks are on which node."""
    output_dtype: torch.dtype | None
    """The type of looked up rows; None for the kernels' own."""
    cuts_dense: bool
    """Whether layers without tables are cut over the ranks."""
