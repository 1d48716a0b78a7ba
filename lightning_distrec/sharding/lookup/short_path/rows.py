"""The exchange of rows on the short path: out after the lookup, and in backward their gradients back.

torchrec's PooledEmbeddingsAllToAll and PooledEmbeddingsReduceScatter send the same numbers by the same collectives
(torchrec/distributed/comm_ops.py); there all columns are concatenated in forward, and split in backward.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_distrec._compat.torchrec_pooled import PooledSharding


class RowsExchange:
    """Collective. The rows of one lookup on their way to the ranks that have the examples.

    rows: (num_ranks * examples, width) that this rank has looked up.
    """

    def __init__(self, sharding: PooledSharding, rows: Tensor, examples: int) -> None:
        self._sharding, self._group = sharding, sharding.group
        self._examples = examples
        self._shape = rows.shape
        widths = list(map(sum, sharding.widths))
        self._per_holder = [examples * width for width in widths]
        """Numbers that come from each rank: of its columns, for this rank's examples."""
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
        out, self._out = self._out, None  # its node refers to this object, in a cycle that would keep the graph
        return dict(zip(self._sharding.names, _ReceiveRows.apply(self, out), strict=True))

    def send_rows(self, rows: Tensor) -> None:
        """Collective. Send the rows to the ranks that have the examples."""
        if self._sharding.num_rows is not None:
            self._buffer = rows.new_empty(self._examples, self._shape[1])
            self._work = dist.reduce_scatter_tensor(self._buffer, rows, group=self._group, async_op=True)
        else:
            self._buffer = rows.new_empty(sum(self._per_holder))
            self._work = dist.all_to_all_single(
                self._buffer, rows.view(-1), self._per_holder, self._per_rank, self._group, async_op=True
            )
        self._sent = rows  # until it has been sent

    def receive_rows(self) -> list[Tensor]:
        """Wait for the rows, and return them by output."""
        self._wait()
        if self._sharding.num_rows is not None:
            return list(self._buffer.split(self._sharding.widths[0], dim=1))
        columns: list[Tensor] = []
        for part, widths in zip(self._buffer.split(self._per_holder), self._sharding.widths, strict=True):
            if widths:
                columns += part.view(self._examples, -1).split(widths, dim=1)
        return columns

    def send_gradients(self, gradients: tuple[Tensor, ...]) -> None:
        """Collective. Send the gradients of the outputs to the ranks that have looked up their rows."""
        for call in self.on_gradient:
            call(gradients[0])
        if self._sharding.num_rows is not None:
            sent = torch.cat(gradients, dim=1)
            self._buffer = sent.new_empty(self._shape)
            self._work = dist.all_gather_into_tensor(self._buffer, sent, group=self._group, async_op=True)
        else:
            sent = self._buffer.new_empty(sum(self._per_holder))
            ends = [0, *accumulate(map(len, self._sharding.widths))]
            for part, first, end in zip(sent.split(self._per_holder), ends, ends[1:], strict=False):
                if first < end:
                    torch.cat(gradients[first:end], dim=1, out=part.view(self._examples, -1))
            self._buffer = sent.new_empty(self._shape)
            self._work = dist.all_to_all_single(
                self._buffer.view(-1), sent, self._per_rank, self._per_holder, self._group, async_op=True
            )
        self._sent = sent

    def receive_gradients(self) -> Tensor:
        """Wait for the gradients of the rows that this rank has looked up, and return their mean over ranks' losses."""
        self._wait()
        gradient, self._buffer = self._buffer, self._buffer[:0]
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
        return rows.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, ctx.exchange.receive_gradients()


class _ReceiveRows(torch.autograd.Function):
    """Waits for the rows; its backward sends their gradients. They are apart, so that backward goes on meanwhile."""

    @staticmethod
    def forward(ctx: Any, exchange: RowsExchange, out: Tensor) -> Any:
        ctx.exchange = exchange
        return tuple(exchange.receive_rows())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.exchange.send_gradients(gradients)
        return None, gradients[0].new_empty(0)
