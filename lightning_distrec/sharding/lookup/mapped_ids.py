"""Maps the ids of a lookup to rows, on the rank that owns the rows, between the input dist and the kernel.

Ids are sent ahead of their step, and mapped in it: in the order of the steps, after the updates of those before.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec._compat.torch import in_backward, saved_tensors_are_hooked
from lightning_distrec._compat.torchrec import route_by_bucket, row_wise_sharding
from lightning_distrec.errors import ShardingError
from lightning_distrec.sharding.lookup.jagged import with_ids
from lightning_distrec.sharding.mapping.spec import RowsOfIds
from lightning_distrec.sharding.row_gradients import LocalShard
from lightning_distrec.sharding.weights.shard_access import without_guards

States = Callable[[], list[tuple[Tensor, float]]]
"""Returns what optimizers keep of a shard by row, each with the value that it starts from."""


class RowReset:
    """Resets rows that another id gets, each to one of `initial_rows`, (num, columns), that the id chooses."""

    def __init__(self, shard: LocalShard, initial_rows: Tensor, states: States) -> None:
        self._shard, self._initial_rows, self._states = shard, initial_rows, states

    @without_guards
    def __call__(self, rows: Tensor, ids: Tensor) -> None:
        """Reset `rows`, which now belong to `ids`; (num_rows,) each."""
        # By .data: lookups of this step may have saved the weight for their backward, and use none of these rows.
        weight = self._shard.weight.data
        weight[rows] = self._initial_rows[ids % len(self._initial_rows)].to(weight.dtype)
        for state, value in self._states():
            state.data[rows] = value
        for note in self._shard.on_reset:
            note(rows)


class MappedIds:
    """The mappings of one collection.

    sharded: torchrec's module, not called yet. mappings, num_rows, resets: by name of a table; in row-wise tables
    without a mapping, an id is the number of its row. learns: whether new ids of the table with this name get rows now.
    """

    def __init__(
        self,
        sharded: Any,
        mappings: Mapping[str, RowsOfIds],
        num_rows: Mapping[str, int],
        resets: Mapping[str, RowReset],
        learns: Callable[[str], bool],
        is_sequence: bool,
    ) -> None:
        num_ranks, rank = dist.get_world_size(), dist.get_rank()
        self._mappings, self._resets, self._learns = mappings, resets, learns
        self._place, sharding = row_wise_sharding(sharded)
        self._tables = tables = [(table.name, len(table.feature_names)) for table in sharding.embedding_tables()]
        # torchrec gives ranks blocks of this size, rounded up; the last ones may have fewer rows, or none.
        self._first_rows = {name: rank * -(-num_rows[name] // num_ranks) for name, _ in tables}
        # Tables without a mapping keep torchrec's blocks: as buckets, one for each rank.
        buckets = {
            name: (mappings[name].spec.num_ids, mappings[name].spec.num_buckets)
            if name in mappings
            else (num_rows[name], num_ranks)
            for name, _ in tables
        }
        route_by_bucket(sharding, buckets, is_sequence)
        self._sent = {
            feature: mappings[table.name].sent
            for table in sharding.embedding_tables()
            if table.name in mappings and mappings[table.name].changes_ids
            for feature in table.feature_names
        }

    def sent(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return features with their ids as they are sent. Raises IdsError: a user's hash function is wrong."""
        if not self._sent:
            return features
        keys, ids = features.keys(), features.values().long()
        parts = zip(keys, ids.split(features.length_per_key()), strict=True)
        sent = [self._sent[key](part) if key in self._sent else part for key, part in parts]
        return with_ids(features, torch.cat(sent))

    @torch.no_grad()
    def map(self, arrived: Any) -> None:
        """Replace ids that have arrived by this rank's rows. Raises ShardingError: in an activation checkpoint."""
        if saved_tensors_are_hooked() or in_backward():
            raise ShardingError(
                f"table '{next(iter(self._mappings))}' maps ids to rows, and is looked up inside of an activation "
                "checkpoint, which looks up again in backward, where an id may have another row. Look it up outside."
            )
        features = arrived[self._place]
        counts = features.length_per_key()
        parts, feature, first = [], 0, 0
        for name, num_features in self._tables:
            end = first + sum(counts[feature : feature + num_features])
            ids = features.values()[first:end].long()
            if name in self._mappings:
                parts.append(self._rows_of(name, ids))
            else:
                # Ids arrive as they are: it is torchrec's own input dist that subtracts the first row.
                parts.append(ids - self._first_rows[name])
            feature, first = feature + num_features, end
        arrived[self._place] = with_ids(features, torch.cat(parts))

    def optimizer_stepped(self) -> None:
        """Rows that were looked up so far may be evicted from now on."""
        for mapping in self._mappings.values():
            mapping.optimizer_stepped()

    def _rows_of(self, name: str, ids: Tensor) -> Tensor:
        mapping = self._mappings[name]
        if self._learns(name):
            evicted = mapping.learn(ids)
            # Before the kernel reads them: an id must not start with another's row and optimizer state.
            if evicted.numel():
                self._resets[name](evicted, mapping.ids.view(-1)[evicted])
        return mapping.find(ids)
