"""The short path of a lookup: what most lookups are, at a part of the host's time and in fewer exchanges.

It serves unweighted bags of one collection whose tables are all table-wise or all row-wise, with equal batch sizes on
all ranks. The control message of an earlier step has how many ids each rank gets, so that no exchange of sizes
is left; lengths and ids are sent together, as 32-bit numbers; rows and their gradients are exchanged by torch's own
collectives. Ids, their order, and all arithmetic are those of torchrec's modules, and so are the bits.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec import gpu
from lightning_distrec._compat.torchrec_ids import MAX_PACKED_RANKS
from lightning_distrec._compat.torchrec_pooled import PooledSharding, pooled_sharding
from lightning_distrec.sharding.lookup.short_path.rows import RowsExchange

Kernel = Callable[[Tensor, Tensor], Tensor]


class ShortPath:
    """The short path of one collection. kernel: looks up ids (num_ids,) with offsets; None: this rank has no rows."""

    def __init__(self, sharding: PooledSharding, kernel: Kernel | None, device: torch.device) -> None:
        self.sharding = sharding
        self.num_ranks = sharding.group.size()
        of_rank = sharding.features[sharding.group.rank()]
        self.num_features = len(of_rank)
        self._kernel = kernel
        self._device = device
        self._keys: list[str] = []
        self._order: list[int] = []
        self._order_on_device: Tensor | None = None
        blocks = None if sharding.num_rows is None else [-(-rows // self.num_ranks) for rows in sharding.num_rows]
        self._blocks = None if blocks is None else torch.tensor(blocks, dtype=torch.int32, device=device)
        # Row-wise, every rank gets every feature; they are multiplied where the ids are divided among the ranks.
        self._sent = list(chain.from_iterable(sharding.features)) if blocks is None else of_rank
        self._ends = [0, *accumulate(map(len, sharding.features))]
        by_feature = [r * self.num_features + f for f in range(self.num_features) for r in range(self.num_ranks)]
        self._by_feature = None
        if self.num_features > 1:
            self._by_feature = torch.tensor(by_feature, dtype=torch.int32, device=device)

    def prepare(self, features: KeyedJaggedTensor) -> "ShortIds":
        """Return the ids of a lookup, of which nothing has left this rank."""
        if features.keys() != self._keys:
            self._set_keys(features.keys())
        lengths, ids = features.lengths().to(torch.int32), features.values().to(torch.int32)
        examples, of_features = features.stride(), features.length_per_key()
        if self._order_on_device is not None:
            of_features = [of_features[i] for i in self._order]
            lengths, ids, _ = torch.ops.fbgemm.permute_2D_sparse_data(
                self._order_on_device, lengths.view(-1, examples), ids, None, sum(of_features)
            )
        if self._blocks is None:
            ends = [0, *accumulate(of_features)]
            counts = [ends[end] - ends[first] for first, end in zip(self._ends, self._ends[1:], strict=False)]
            return ShortIds(self, examples, lengths.view(-1), ids, counts)
        lengths, ids, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
            lengths.view(-1), ids, False, False, self._blocks, self.num_ranks, None
        )
        return ShortIds(self, examples, lengths, ids, gpu.HostCopy(lengths.view(self.num_ranks, -1).sum(1)))

    def _set_keys(self, keys: list[str]) -> None:
        self._keys, self._order = list(keys), [keys.index(name) for name in self._sent]
        is_permuted = self._order != list(range(len(keys)))
        self._order_on_device = None
        if is_permuted:
            self._order_on_device = torch.tensor(self._order, dtype=torch.int32, device=self._device)

    def num_lengths(self, examples: int) -> list[int]:
        """Return how many lengths each rank gets."""
        return [(end - first) * examples for first, end in zip(self._ends, self._ends[1:], strict=False)]

    def arrange(self, lengths: list[Tensor], ids: list[Tensor], examples: int) -> tuple[Tensor, Tensor]:
        """Return ids and offsets as the kernel takes them, given what every rank has sent."""
        all_lengths, all_ids = torch.cat(lengths), torch.cat(ids)
        if self._by_feature is not None:
            all_lengths, all_ids, _ = torch.ops.fbgemm.permute_2D_sparse_data(
                self._by_feature, all_lengths.view(-1, examples), all_ids, None, all_ids.numel()
            )
        return all_ids, torch.ops.fbgemm.asynchronous_complete_cumsum(all_lengths.view(-1))

    def look_up(self, ids: "ShortIds") -> RowsExchange:
        """Collective. Look up ids that have arrived and send the rows back."""
        if self._kernel is None:
            grad = torch.is_grad_enabled()
            rows = torch.empty(ids.examples * self.num_ranks, 0, device=self._device, requires_grad=grad)
        else:
            rows = self._kernel(*ids.arrived)
        return RowsExchange(self.sharding, rows, ids.examples)


class ShortIds:
    """The ids of one lookup, on their way to the ranks that have their rows."""

    def __init__(
        self, path: ShortPath, examples: int, lengths: Tensor, ids: Tensor, counts: list[int] | gpu.HostCopy
    ) -> None:
        self.path = path
        self.examples = examples
        self.lengths, self.ids = lengths, ids
        self._counts = counts
        self.arrived: tuple[Tensor, Tensor]
        """What this rank looks up, once it has arrived: ids and offsets."""

    def look_up(self) -> RowsExchange:
        """Collective. Look up what has arrived, and send the rows back."""
        return self.path.look_up(self)

    @property
    def counts(self) -> list[int]:
        """How many ids each rank gets."""
        if isinstance(self._counts, gpu.HostCopy):
            self._counts = self._counts.read()
        return self._counts


def can_go_short(features: KeyedJaggedTensor) -> bool:
    """Whether these features can; the ranks agree on it by their form (lookup_consensus.py)."""
    return features.weights_or_none() is None and not features.variable_stride_per_key()


def short_path_of(
    sharded: object, kernels: Sequence[Kernel], has_small_ids: bool, num_ranks: int, device: torch.device
) -> ShortPath | None:
    """Return the short path of a sharded collection, None where it has none; alike on all ranks."""
    sharding = pooled_sharding(sharded) if has_small_ids else None
    if sharding is None or not 1 < num_ranks <= MAX_PACKED_RANKS or sharding.group.size() != num_ranks:
        return None
    return ShortPath(sharding, kernels[0] if kernels else None, device)
