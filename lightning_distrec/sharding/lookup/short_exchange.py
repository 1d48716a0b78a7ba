"""The input dist on the short path: one exchange of lengths and ids for all lookups; sizes are known before."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distrec import spans
from lightning_distrec.sharding.lookup.ids_exchange import IdsExchange
from lightning_distrec.sharding.lookup.request import LookupRequest
from lightning_distrec.sharding.lookup.short_path.ids import ShortIds


def start_exchange(
    requests: list[LookupRequest], stream: torch.cuda.Stream | None, group: Any
) -> "IdsExchange | ShortExchange | BothExchanges":
    """Collective. Start to exchange the ids of these lookups, each on its way; arguments are those of IdsExchange."""
    for request in requests:
        # What the ranks know alike: they have agreed on the sizes.
        if request.short is not None and (request.sizes is None or not request.sizes[0] == request.sizes[1] > 0):
            request.short = None
    short = [request for request in requests if request.short is not None]
    others = [request for request in requests if request.short is None]
    if not short:
        return IdsExchange(others, stream=stream, group=group)
    if not others:
        return ShortExchange(short, stream, group)
    return BothExchanges(ShortExchange(short, stream, group), IdsExchange(others, stream=stream, group=group))


class BothExchanges:
    """The exchanges of a batch of which some lookups go the short path."""

    def __init__(self, short: "ShortExchange", others: IdsExchange) -> None:
        self._exchanges: Sequence[ShortExchange | IdsExchange] = (short, others)

    def send_ids(self) -> None:
        """Collective. Send the ids."""
        for exchange in self._exchanges:
            exchange.send_ids()

    def wait(self) -> None:
        """Wait for the ids."""
        for exchange in self._exchanges:
            exchange.wait()

    def drop(self) -> None:
        """Wait for what has been sent, and send no more."""
        for exchange in self._exchanges:
            exchange.drop()


class ShortExchange:
    """The ids of several lookups; arguments as of IdsExchange. Nothing is sent before `send_ids`."""

    def __init__(self, requests: list[LookupRequest], stream: torch.cuda.Stream | None, group: Any) -> None:
        self._requests = requests
        self._stream = stream
        first = requests[0].short
        assert first is not None
        self._group = group or first.path.sharding.group
        self._sizes: list[int] = []
        self._sent = self._received = torch.empty(0)
        self._work: Any = None
        self._was_sent = self._has_arrived = False

    def send_ids(self) -> None:
        """Collective. Send the ids, the first time it is called."""
        if self._was_sent:
            return
        self._was_sent = True
        with self._on_stream(), torch.no_grad(), spans.span(spans.START_INPUT_DIST):
            chunks: list[Sequence[Tensor]] = []
            sent, received = [], []
            for request in self._requests:
                ids, of_ranks = _short(request), request.received
                assert of_ranks is not None
                lengths = ids.path.num_lengths(ids.examples)
                chunks += [ids.lengths.split(lengths), ids.ids.split(ids.counts)]
                sent += [lengths, ids.counts]
                received += [[ids.path.num_features * ids.examples] * len(of_ranks), list(of_ranks)]
            by_rank = list(zip(*received, strict=True))
            self._sizes = list(chain.from_iterable(by_rank))
            self._sent = torch.cat(list(chain.from_iterable(zip(*chunks, strict=True))))
            self._received = self._sent.new_empty(sum(self._sizes))
            self._work = dist.all_to_all_single(
                self._received,
                self._sent,
                list(map(sum, by_rank)),
                list(map(sum, zip(*sent, strict=True))),
                group=self._group,
                async_op=True,
            )

    def wait(self) -> None:
        """Wait for the ids of all lookups, and put them into `ShortIds.arrived`, the first time it is called."""
        self.send_ids()
        if self._has_arrived:
            return
        self._has_arrived = True
        with spans.span(spans.WAIT_INPUT_DIST):
            with self._on_stream(), torch.no_grad():
                self._work.wait()
                parts = self._received.split(self._sizes)
                step = 2 * len(self._requests)
                for i, request in enumerate(self._requests):
                    ids = _short(request)
                    lengths, values = list(parts[2 * i :: step]), list(parts[2 * i + 1 :: step])
                    ids.arrived = ids.path.arrange(lengths, values, ids.examples)
            if self._stream is not None:
                now = torch.cuda.current_stream(self._stream.device)
                now.wait_stream(self._stream)
                for request in self._requests:
                    for tensor in _short(request).arrived:
                        tensor.record_stream(now)
                    request.features.record_stream(now)  # pooling of means reads their lengths
        self._work, self._sent, self._received = None, self._sent[:0], self._received[:0]

    def drop(self) -> None:
        """Wait for what this rank has sent, without sending more: other ranks may not take part."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        self._was_sent = self._has_arrived = True

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def _short(request: LookupRequest) -> ShortIds:
    assert request.short is not None
    return request.short
