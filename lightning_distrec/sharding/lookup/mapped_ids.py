"""Maps the ids of a lookup to rows, on the rank that owns the rows, between the input dist and the
kernel.

Ids are sent ahead of their step, and mapped in it: in the order of the steps, after the updates of
those before.
"""

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec._compat.torch import in_backward, saved_tensors_are_hooked
from lightning_distrec._compat.torchrec_modules import route_by_bucket, row_wise_sharding
from lightning_distrec.errors import ShardingError
from lightning_distrec.sharding.lookup.jagged import with_ids
from lightning_distrec.sharding.mapping.id_mapping import flagged
from lightning_distrec.sharding.mapping.spec import RowsOfIds
from lightning_distrec.sharding.row_gradients import LocalShard
from lightning_distrec.sharding.weights.shard_access import without_guards

States = Callable[[], list[tuple[Tensor, float]]]
"""Returns what optimizers keep of a shard by row, each with the value that it starts from."""


class RowReset:
    """Resets rows that another id gets, each to one of `initial_rows`, (num, columns), that the id
    chooses."""

    def __init__(self, shard: LocalShard, initial_rows: Tensor, states: States) -> None:
        self._shard = shard
        self._initial_rows = initial_rows
        self._states = states

    @without_guards
    def __call__(self, rows: Tensor, ids: Tensor) -> None:
        """Reset `rows`, (num_rows,), -1 for none. ids: those that all rows of the shard have
        now."""
        # Where it is none, another of the rows is reset once more to the same; without any, row 0
        # keeps what it has.
        is_row = rows >= 0
        is_any = is_row.any()
        rows = torch.where(is_row, rows, rows[is_row.byte().argmax(0, keepdim=True)]).clamp(min=0)

        def write(values: Tensor, initial: Tensor | float) -> None:
            values[rows] = torch.where(is_any, initial, values[rows])

        # By .data: lookups of this step may have saved the weight for their backward, and use none
        # of these rows.
        weight = self._shard.weight.data
        write(weight, self._initial_rows[ids[rows] % len(self._initial_rows)].to(weight.dtype))
        for state, value in self._states():
            write(state.data, value)
        for note in self._shard.on_reset:
            note(rows)


class MappedIds:
    """The mappings of one collection.

    sharded: torchrec's module, not called yet. mappings, num_rows, resets: by name of a table; in
    row-wise tables without a mapping, an id is the number of its row. learns: whether new ids of
    the table with this name get rows now.
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
        num_ranks = dist.get_world_size()
        rank = dist.get_rank()
        self._mappings = mappings
        self._resets = resets
        self._learns = learns
        self._place, sharding = row_wise_sharding(sharded)
        self._num_features: dict[str, int] = {}
        self._first_rows: dict[str, int] = {}
        self._sent: dict[str, Any] = {}
        buckets = {}
        for table in sharding.embedding_tables():
            name = table.name
            mapping = mappings.get(table.name)
            self._num_features[name] = len(table.feature_names)
            if mapping is None:
                # torchrec gives ranks blocks of this size, rounded up; the last ones may have fewer
                # rows, or none. The table keeps them: as buckets, one for each rank.
                self._first_rows[name] = rank * -(-num_rows[name] // num_ranks)
                buckets[name] = num_rows[name], num_ranks
                continue
            buckets[name] = mapping.spec.num_ids, mapping.spec.num_buckets
            if mapping.changes_ids:
                self._sent |= dict.fromkeys(table.feature_names, mapping.sent)
        route_by_bucket(sharding, buckets, is_sequence)

    def sent(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return features with their ids as they are sent. Raises IdsError: a user's hash function
        is wrong."""
        if not self._sent:
            return features
        keys = features.keys()
        ids = features.values().long()
        parts = zip(keys, ids.split(features.length_per_key()), strict=True)
        sent = [self._sent[key](part) if key in self._sent else part for key, part in parts]
        return with_ids(features, torch.cat(sent))

    @torch.no_grad()
    def map(self, arrived: Any) -> None:
        """Replace ids that have arrived by this rank's rows. Raises ShardingError: in an activation
        checkpoint."""
        if saved_tensors_are_hooked() or in_backward():
            raise ShardingError(
                f"table '{next(iter(self._mappings))}' maps ids to rows, and is looked up inside "
                "of an activation checkpoint, which looks up again in backward, where an id may "
                "have another row. Look it up outside."
            )
        features = arrived[self._place]
        ids_per_feature = iter(features.values().long().split(features.length_per_key()))
        parts = {}
        learned = {}
        for name, num_features in self._num_features.items():
            parts[name] = torch.cat(list(islice(ids_per_feature, num_features)))
            if name in self._mappings and self._learns(name):
                learned[name] = parts[name]
        self._learn(learned)
        rows = []
        for name, ids in parts.items():
            if name in self._mappings:
                rows.append(self._mappings[name].find(ids))
            else:
                # They arrive as they are: torchrec's own input dist subtracts the first row.
                rows.append(ids - self._first_rows[name])
        arrived[self._place] = with_ids(features, torch.cat(rows))

    def optimizer_stepped(self) -> None:
        """Rows that were looked up so far may be evicted from now on."""
        for mapping in self._mappings.values():
            mapping.optimizer_stepped()

    def _learn(self, ids_by_table: Mapping[str, Tensor]) -> None:
        """Let new ids have rows, which start again where they were another's."""
        noted = {name: self._mappings[name].note_lookup(ids) for name, ids in ids_by_table.items()}
        # Together: for each copy the host waits until the device has done what it was given before.
        counts = list(map(len, noted.values()))
        numbers = torch.cat(list(noted.values())).tolist() if sum(counts) else []
        end = 0
        for name, count in zip(noted, counts, strict=True):
            mapping = self._mappings[name]
            first = end
            end = end + count
            evicted = mapping.learn(numbers[first:end])
            evicted = evicted[flagged(evicted >= 0)]
            # Before the kernel reads them: an id must not start with another's row and optimizer
            # state.
            if evicted.numel():
                self._resets[name](evicted, mapping.ids.view(-1))
