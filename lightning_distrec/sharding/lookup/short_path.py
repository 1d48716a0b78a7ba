"""The short path of a lookup: what most lookups are, at a part of the host's time and in fewer
exchanges.

It serves unweighted bags of one collection whose tables are all table-wise or all row-wise, with
equal batch sizes on all ranks. How many ids each rank gets is in the control message of an earlier
step, or in an exchange of these numbers; lengths and ids are sent together, as 32-bit numbers
(ids_exchange.py); rows and their gradients are exchanged by torch's own collectives. Ids, their
order, and all arithmetic are those of torchrec's modules, and so are the bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec import gpu
from lightning_distrec._compat.gloo import tables_dist
from lightning_distrec._compat.torchrec_ids import MAX_PACKED_RANKS, PooledSharding, pooled_sharding

Kernel = Callable[[Tensor, Tensor], Tensor]


class ShortPath:
    """The short path of one collection. kernel: looks up ids (num_ids,) with offsets; None: this
    rank has no rows."""

    def __init__(
        self, sharding: PooledSharding, kernel: Kernel | None, device: torch.device
    ) -> None:
        self.sharding = sharding
        self._kernel = kernel
        self._device = device
        self.num_ranks = sharding.group.size()
        local_features = sharding.features[sharding.group.rank()]
        self.num_features = len(local_features)
        self._keys: list[str] = []
        self._order: list[int] = []
        self._order_on_device: Tensor | None = None
        self._blocks: Tensor | None = None
        self._sent = list(chain.from_iterable(sharding.features))
        if sharding.num_rows is not None:
            # The last ranks may have fewer rows: torchrec rounds blocks up too.
            blocks = [-(-rows // self.num_ranks) for rows in sharding.num_rows]
            self._blocks = torch.tensor(blocks, dtype=torch.int32, device=device)
            # Row-wise, every rank gets every feature; they are multiplied where the ids are divided
            # among the ranks.
            self._sent = local_features
        self._ends = [0, *accumulate(map(len, sharding.features))]
        # Ids arrive rank by rank, and the kernel takes them feature by feature.
        self._feature_order = None
        if self.num_features > 1:
            places = torch.arange(self.num_ranks * self.num_features, dtype=torch.int32)
            order = places.view(self.num_ranks, -1).t().flatten()
            self._feature_order = order.to(device)

    def prepare(self, features: KeyedJaggedTensor) -> "ShortIds":
        """Return the ids of a lookup, of which nothing has left this rank."""
        if features.keys() != self._keys:
            self._set_keys(features.keys())
        # 32 bits are enough: collections with more rows have no short path (`has_small_ids`).
        lengths = features.lengths().to(torch.int32)
        ids = features.values().to(torch.int32)
        examples = features.stride()
        num_ids = features.length_per_key()
        if self._order_on_device is not None:
            num_ids = [num_ids[i] for i in self._order]
            lengths, ids, _ = torch.ops.fbgemm.permute_2D_sparse_data(
                self._order_on_device, lengths.view(-1, examples), ids, None, sum(num_ids)
            )
        if self._blocks is None:
            ends = [0, *accumulate(num_ids)]
            counts = [ends[end] - ends[first] for first, end in pairwise(self._ends)]
            return ShortIds(self, examples, lengths.view(-1), ids, counts)
        lengths, ids, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
            lengths.view(-1), ids, False, False, self._blocks, self.num_ranks, None
        )
        copy = gpu.HostCopy(lengths.view(self.num_ranks, -1).sum(1))
        return ShortIds(self, examples, lengths, ids, copy)

    def _set_keys(self, keys: list[str]) -> None:
        self._keys, self._order = list(keys), list(map(keys.index, self._sent))
        self._order_on_device = None
        if self._order != list(range(len(keys))):
            self._order_on_device = torch.tensor(
                self._order, dtype=torch.int32, device=self._device
            )

    def num_lengths(self, examples: int) -> list[int]:
        """Return how many lengths each rank gets."""
        return [(end - first) * examples for first, end in pairwise(self._ends)]

    def arrange(
        self, lengths: list[Tensor], ids: list[Tensor], examples: int
    ) -> tuple[Tensor, Tensor]:
        """Return ids and offsets as the kernel takes them, given what every rank has sent."""
        all_lengths = torch.cat(lengths)
        all_ids = torch.cat(ids)
        if self._feature_order is not None:
            all_lengths, all_ids, _ = torch.ops.fbgemm.permute_2D_sparse_data(
                self._feature_order, all_lengths.view(-1, examples), all_ids, None, all_ids.numel()
            )
        return all_ids, torch.ops.fbgemm.asynchronous_complete_cumsum(all_lengths.view(-1))

    def look_up(self, ids: "ShortIds") -> "RowsExchange":
        """Collective. Look up ids that have arrived and send the rows back."""
        if self._kernel is None:
            # A rank without rows takes part in both exchanges: by this leaf, backward reaches the
            # second one.
            grad = torch.is_grad_enabled()
            rows = torch.empty(
                ids.examples * self.num_ranks, 0, device=self._device, requires_grad=grad
            )
        else:
            rows = self._kernel(*ids.arrived)
        return RowsExchange(self.sharding, rows, ids.examples)


@dataclass(eq=False)
class ShortIds:
    """The ids of one lookup, on their way to the ranks that have their rows."""

    path: ShortPath
    examples: int
    lengths: Tensor
    ids: Tensor
    _counts: list[int] | gpu.HostCopy
    arrived: tuple[Tensor, Tensor] = field(init=False)
    """What this rank looks up, once it has arrived: ids and offsets."""

    @property
    def counts(self) -> list[int]:
        """How many ids each rank gets."""
        if isinstance(self._counts, gpu.HostCopy):
            self._counts = self._counts.read()
        return self._counts


def short_path_of(
    sharded: object, kernels: Sequence[Kernel], num_ranks: int, device: torch.device
) -> ShortPath | None:
    """Return the short path of a sharded collection with small ids, None: it has none; alike on all
    ranks."""
    sharding = pooled_sharding(sharded)
    if sharding is None or sharding.group.size() != num_ranks:
        return None
    if not 1 < num_ranks <= MAX_PACKED_RANKS:
        return None
    return ShortPath(sharding, kernels[0] if kernels else None, device)


class RowsExchange:
    """Collective. The rows of one lookup on their way to the ranks that have the examples; in
    backward, gradients.

    rows: (num_ranks * examples, width) that this rank has looked up. torchrec's
    PooledEmbeddingsAllToAll and PooledEmbeddingsReduceScatter send the same numbers
    (torchrec/distributed/comm_ops.py), by the same collectives but for
    `PooledSharding.single_holder`; there all columns are concatenated in forward, and split in
    backward.
    """

    def __init__(self, sharding: PooledSharding, rows: Tensor, examples: int) -> None:
        self._sharding = sharding
        self._group = sharding.group
        self._holder = sharding.single_holder
        self._examples = examples
        self._shape = rows.shape
        widths = sharding.rank_widths
        self._per_holder = [examples * width for width in widths]
        """Numbers that come from each rank: of its columns, for this rank's examples."""
        self._sizes = list(filter(None, self._per_holder))
        """Of the ranks that have some."""
        self._per_rank = [examples * rows.shape[1]] * len(widths)
        """Numbers that go to each rank."""
        self.on_gradient: list[Callable[[Tensor], None]] = []
        """Called in backward, before gradients are sent, with one of them."""
        self._work: Any = None
        self._buffer: Tensor
        self._sent: Tensor | None = None
        self._out: Tensor | None = _SendRows.apply(self, rows)

    def wait(self) -> dict[str, Tensor]:
        """Wait for the rows; return output -> (examples, width)."""
        # its node refers to this object, in a cycle that would keep the graph
        out = self._out
        self._out = None
        return dict(zip(self._sharding.names, _ReceiveRows.apply(self, out), strict=True))

    def send_rows(self, rows: Tensor) -> None:
        """Collective. Send the rows to the ranks that have the examples."""
        if self._sharding.num_rows is not None:
            self._buffer = rows.new_empty(self._examples, self._shape[1])
            self._work = dist.reduce_scatter_tensor(
                self._buffer, rows, group=self._group, async_op=True
            )
        elif self._holder is not None:
            self._buffer = rows.new_empty(sum(self._per_holder))
            self._work = dist.scatter(
                self._buffer.view(self._examples, -1),
                list(rows.split(self._examples)) if self._shape[1] else None,
                group_src=self._holder,
                group=self._group,
                async_op=True,
            )
        else:
            self._buffer = rows.new_empty(sum(self._per_holder))
            self._work = tables_dist.all_to_all_single(
                self._buffer,
                rows.view(-1),
                self._per_holder,
                self._per_rank,
                self._group,
                async_op=True,
            )
        self._sent = rows  # until it has been sent

    def receive_rows(self) -> list[Tensor]:
        """Wait for the rows, and return them by output."""
        self._wait()
        if self._sharding.num_rows is not None:
            return list(self._buffer.split(self._sharding.widths[0], dim=1))
        columns: list[Tensor] = []
        for part, widths in zip(
            self._buffer.split(self._sizes), self._sharding.held_widths, strict=True
        ):
            columns += part.view(self._examples, -1).split(widths, dim=1)
        return columns

    def send_gradients(self, gradients: tuple[Tensor, ...]) -> None:
        """Collective. Send the gradients of the outputs to the ranks that have looked up their
        rows."""
        for call in self.on_gradient:
            call(gradients[0])
        if self._sharding.num_rows is not None:
            sent = torch.cat(gradients, dim=1)
            self._buffer = sent.new_empty(self._shape)
            self._work = dist.all_gather_into_tensor(
                self._buffer, sent, group=self._group, async_op=True
            )
        else:
            sent = self._buffer.new_empty(sum(self._per_holder))
            ends = [0, *accumulate(map(len, self._sharding.held_widths))]
            for part, (first, end) in zip(sent.split(self._sizes), pairwise(ends), strict=True):
                # Written to where they are sent from, without a copy in between.
                torch.cat(gradients[first:end], dim=1, out=part.view(self._examples, -1))
            self._buffer = sent.new_empty(self._shape)
            if self._holder is not None:
                self._work = dist.gather(
                    sent.view(self._examples, -1),
                    list(self._buffer.split(self._examples)) if self._shape[1] else None,
                    group_dst=self._holder,
                    group=self._group,
                    async_op=True,
                )
            else:
                self._work = tables_dist.all_to_all_single(
                    self._buffer.view(-1),
                    sent,
                    self._per_rank,
                    self._per_holder,
                    self._group,
                    async_op=True,
                )
        self._sent = sent

    def receive_gradients(self) -> Tensor:
        """Wait for the gradients of the rows that this rank has looked up, and return their mean
        over ranks' losses."""
        self._wait()
        gradient = self._buffer
        self._buffer = self._buffer[:0]
        return gradient.div_(self._sharding.divisor) if self._sharding.divisor != 1 else gradient

    def _wait(self) -> None:
        self._work.wait()
        self._work = self._sent = None


class _SendRows(torch.autograd.Function):
    """Sends the kernel's rows; its backward waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, exchange: RowsExchange, rows: Tensor) -> Tensor:
        ctx.exchange = exchange
        exchange.send_rows(rows)
        # No values, a link between the two nodes: backward then runs the other one first, which
        # sends.
        return rows.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, ctx.exchange.receive_gradients()


class _ReceiveRows(torch.autograd.Function):
    """Waits for the rows; its backward sends their gradients. They are apart, so that backward goes
    on meanwhile."""

    @staticmethod
    def forward(ctx: Any, exchange: RowsExchange, out: Tensor) -> Any:
        ctx.exchange = exchange
        return tuple(exchange.receive_rows())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.exchange.send_gradients(gradients)
        return None, gradients[0].new_empty(0)
