"""What the lookup of one sharded collection is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
import torch.distributed as dist
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import PoolingType

from lightning_distrec.ranks import Ranks
from lightning_distrec.sharding.lookup.mapped_ids import MappedIds
from lightning_distrec.sharding.sharders import ROW_TYPES
from lightning_distrec.sharding.sharding_groups import ShardingGroups
from lightning_distrec.sharding.tables import SMALL_ROWS, Table, output_names

CheckIds = Literal["error", "warn", "ignore"]


@dataclass(frozen=True)
class TableUse:
    """What a lookup needs to know of a table's sharding and update."""

    sharding_type: str
    weight: torch.nn.Parameter
    """This rank's first shard, which is frozen and unfrozen with the table."""
    adds_up: bool
    """Whether two updates inside of one backward are one with the sum of their gradients."""
    in_backward: bool = False
    deduplicated: bool = False
    """Whether repeated ids are sent once."""
    takes_unequal_batches: bool = True
    """Whether FBGEMM updates it by gradients of bags whose features have batch sizes of their
    own."""

    @property
    def is_replicated(self) -> bool:
        """Whether every rank has all rows."""
        return self.sharding_type == "data_parallel"


@dataclass(frozen=True, kw_only=True)
class LookupSetup:
    """What the lookup of one sharded collection is made of."""

    sharded: ShardedModule
    tables: list[Table]
    """The collection's tables, in its order."""
    uses: dict[str, TableUse]
    """Name of a table -> how it is sharded and updated; the first step may change that."""
    known_keys: dict[str, list[str]]
    """Collection -> the features in the order of its first call, which adds it. torchrec's module
    remembers that order for its life, which may be longer than one run."""
    check_ids: CheckIds
    ranks: Ranks
    """Those that agree on lookups: all."""
    before_forward: Callable[[], None]
    """Called before every forward that may be followed by a backward."""
    device: torch.device
    output_dtype: torch.dtype | None = None
    """The type of what is returned; None for the kernels' own."""
    compare_examples: Callable[[int, int, int], None] | None = None
    """Called with this rank's number of examples, of ids for an nn.Embedding, and the minimum and
    maximum over ranks;
    None: ranks are not compared."""
    note_used_tables: Callable[[set[str] | None], None] | None = None
    """Called before a lookup of an EmbeddingCollection with the set that its backward fills with
    the names of the tables that get gradients."""
    note_gradients: Callable[[str | None], None] | None = None
    """Called in backward with a table that gets gradients, or with None: all tables of a collection
    of bags do. None: this rank has rows of all tables."""
    groups: ShardingGroups | None = None
    """The ranks among which ids are exchanged; they are agreed on among all. None: all ranks."""
    mapped: MappedIds | None = None

    @cached_property
    def path(self) -> str:
        """The collection's path in the LightningModule."""
        return self.tables[0].collection

    @cached_property
    def pooled(self) -> bool:
        """Whether rows come as one embedding for each bag."""
        return self.tables[0].pooled

    @cached_property
    def is_weighted(self) -> bool:
        """Whether the collection is weighted."""
        # EmbeddingCollection has no such method.
        return bool(getattr(self.tables[0].module, "is_weighted", lambda: False)())

    @cached_property
    def counts_ids(self) -> bool:
        """Whether a call does not show its number of examples, so that ids are counted."""
        return isinstance(self.tables[0].plain, torch.nn.Embedding)

    @cached_property
    def has_small_ids(self) -> bool:
        """Whether ids are sent as 32-bit numbers."""
        return all(table.num_ids <= SMALL_ROWS for table in self.tables)

    @cached_property
    def needs_equal_batches(self) -> bool:
        """Whether smaller batches are padded."""
        # gloo cannot gather the gradients of unequal batches (torchrec/distributed/comm_ops.py,
        # ReduceScatterV_Wait).
        has_rows = any(use.sharding_type in ROW_TYPES for use in self.uses.values())
        return self.pooled and has_rows and dist.get_backend() == "gloo"

    @cached_property
    def takes_unequal_batches(self) -> bool:
        """Whether torchrec's module looks up features of unequal batch sizes exactly."""
        # Not of rows: means would be divided by other bags' sizes.
        types = ("table_wise", "column_wise")
        takes = (
            use.takes_unequal_batches and use.sharding_type in types for use in self.uses.values()
        )
        # On a CPU FBGEMM refuses them where a rank has several kernels.
        return self.device.type != "cpu" and all(takes)

    @cached_property
    def summed_means(self) -> dict[str, str]:
        """Output -> feature, of those that arrive as sums over ranks and are to become means."""

        # Each rank looks up a part of a bag in its rows: only the sum over ranks is divided by the
        # size of the bag.
        means = {}
        for output, (table, feature) in self.outputs.items():
            is_mean = self.pooled and table.config.pooling == PoolingType.MEAN
            if is_mean and self.uses[table.name].sharding_type in ROW_TYPES:
                means[output] = feature
        return means

    @cached_property
    def outputs(self) -> dict[str, tuple[Table, str]]:
        """Output, in the unsharded order -> its table and feature."""
        sources = []
        for table in self.tables:
            sources += [(table, feature) for feature in table.config.feature_names]
        return dict(zip(output_names(self.tables), sources, strict=True))
