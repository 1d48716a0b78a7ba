"""What checkpoints need to know of sharded tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from torch.optim import Optimizer

if TYPE_CHECKING:  # they load torchrec, which modules without tables have no use for
    from lightning_distrec.optimizers.translation import TableUpdate
    from lightning_distrec.sharding.sharded_tables import ShardedTables


class SavedTables(Protocol):
    """The sharded tables of a run, with what updates them."""

    @property
    def shards(self) -> ShardedTables:
        """The tables' shards on this rank."""

    @property
    def updates(self) -> Mapping[str, TableUpdate]:
        """Full name of a table -> what updates it."""

    @property
    def table_optimizers(self) -> list[Optimizer]:
        """The optimizers of tables alone."""

    @property
    def all_optimizers(self) -> list[Optimizer]:
        """Those of configure_optimizers, and those of tables alone."""

    def plan_files(self) -> dict[str, bytes]:
        """Return name -> content of the files that a checkpoint has about the plan."""

    def num_fused_steps(self, name: str) -> int:
        """Return how often the optimizer of a table that is updated inside of backward has stepped."""

    def set_fused_steps(self, name: str, num_steps: int) -> None:
        """Continue counting the steps of a table's optimizer from here."""
