"""The input dist of several lookups at once: their ids are sent to the ranks that hold the rows.

By torchrec's modules: one exchange of sizes for all lookups, then one of ids. torchrec's train
pipelines do the same (torchrec/distributed/train_pipeline), and its classes are used here. On the
short path: one exchange of lengths and ids; sizes are known before, by the control message of an
earlier step, or by an exchange of them.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_distrec import spans
from lightning_distrec._compat.gloo import tables_dist
from lightning_distrec._compat.torchrec_ids import (
    FusedSplits,
    defer_ids_exchange,
    weight_routes,
)
from lightning_distrec.sharding.lookup.request import LookupRequest
from lightning_distrec.sharding.lookup.short_path import ShortIds

ABOUT_LOOKUPS = attrgetter("context", "setup.has_small_ids", "late_weights")
Stream: TypeAlias = torch.cuda.Stream | None


class _Exchange:
    """requests: prepared, with `sizes` known where they count; alike on all ranks.

    stream: on which a GPU does this, and prepared the requests, during the computation; None on a
    CPU.
    """

    def __init__(self, requests: list[LookupRequest], stream: Stream) -> None:
        self._requests = requests
        self._stream = stream

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _hand_over(self, stream: torch.cuda.Stream) -> None:
        """Let the step read what has arrived: its stream waits for this one, the host does not."""
        current = torch.cuda.current_stream(stream.device)
        current.wait_stream(stream)
        for request in self._requests:
            request.record_stream(current)


class IdsExchange(_Exchange):
    """Collective. Start to exchange the sizes of these lookups' ids: they are in flight until
    `send_ids`.

    values: numbers that this rank sends along; `values_of_ranks` returns those of all ranks.
    group: the process group to use; None: that of the tables, on which all collectives must be in
    one order.
    """

    def __init__(
        self,
        requests: list[LookupRequest],
        values: tuple[int, ...] = (),
        stream: Stream = None,
        group: object = None,
    ) -> None:
        super().__init__(requests, stream)
        with self._on_stream(), torch.no_grad(), spans.span(spans.START_INPUT_DIST):
            splits = []
            for request in requests:
                # Here, where the batch sizes of all ranks are known.
                request.pad()
                sharded = request.setup.sharded
                request.context = sharded.create_context()
                # torchrec would start an exchange of sizes for each module; one serves all of them
                # below.
                with defer_ids_exchange(sharded, group):
                    splits.append(sharded.input_dist(request.context, request.padded_features))
            contexts, are_small, learned = zip(*map(ABOUT_LOOKUPS, requests), strict=True)
            self._sizes: FusedSplits | None = FusedSplits(
                splits, contexts, values, are_small, learned
            )
        self._ids: list[Callable[[], object]] = []

    def values_of_ranks(self) -> list[list[int]] | None:
        """Collective. Return each rank's values; None: nothing is exchanged, because every rank has
        all rows."""
        assert self._sizes is not None
        with self._on_stream(), torch.no_grad(), spans.span(spans.WAIT_INPUT_DIST):
            return self._sizes.wait_for_numbers()

    def send_ids(self) -> None:
        """Collective. Wait for the sizes, and send the ids, the first time it is called."""
        if self._sizes is not None:
            sizes = self._sizes
            self._sizes = None
            with self._on_stream(), torch.no_grad(), spans.span(spans.START_INPUT_DIST):
                started = sizes.start_ids()
            self._ids = [awaitable.wait for awaitable in started]
            for request, awaitable in zip(self._requests, started, strict=True):
                if request.late_weights is not None:
                    request.weight_routes = weight_routes(awaitable)

    def wait(self) -> None:
        """Wait for the ids of all lookups, and put them into `LookupRequest.ids`, the first time it
        is called."""
        self.send_ids()
        waits = self._ids
        self._ids = []
        if not waits:
            return
        with spans.span(spans.WAIT_INPUT_DIST):
            with self._on_stream(), torch.no_grad():
                for request, wait in zip(self._requests, waits, strict=True):
                    request.ids = wait()
            if self._stream is not None:
                self._hand_over(self._stream)

    def drop(self) -> None:
        """Wait for what this rank has sent, without sending more: other ranks may not take part."""
        if self._sizes is not None:
            self._sizes.wait_for_numbers()
            self._sizes = None
        waits = self._ids
        self._ids = []
        # which owns the buffers: freed, it gives them to what comes after the exchange
        with self._on_stream():
            for wait in waits:
                wait()


class ShortExchange(_Exchange):
    """The ids of several lookups on the short path. Nothing is sent before `send_ids`. group: as of
    IdsExchange."""

    def __init__(self, requests: list[LookupRequest], stream: Stream, group: Any) -> None:
        super().__init__(requests, stream)
        self._group = group or _short(requests[0]).path.sharding.group
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
            numbers: list[Tensor] = []
            sent = []
            received = []
            for request in self._requests:
                # For each rank: lengths and ids of the first lookup, then those of the second, and
                # so on.
                ids = _short(request)
                counts = request.received
                assert counts is not None
                lengths = ids.path.num_lengths(ids.examples)
                numbers += [ids.lengths, ids.ids]
                sent += [lengths, ids.counts]
                # All ranks have this number of examples: other batches have left the short path in
                # `start_exchange`.
                received += [[ids.path.num_features * ids.examples] * len(counts), list(counts)]
            per_rank = list(zip(*received, strict=True))
            self._sizes = list(chain.from_iterable(per_rank))
            self._sent = _join_by_rank(numbers, sent)
            self._received = self._sent.new_empty(sum(self._sizes))
            self._work = tables_dist.all_to_all_single(
                self._received,
                self._sent,
                list(map(sum, per_rank)),
                list(map(sum, zip(*sent, strict=True))),
                group=self._group,
                async_op=True,
            )

    def wait(self) -> None:
        """Wait for the ids of all lookups, and put them into `ShortIds.arrived`, the first time it
        is called."""
        self.send_ids()
        if self._has_arrived:
            return
        self._has_arrived = True
        with spans.span(spans.WAIT_INPUT_DIST):
            with self._on_stream(), torch.no_grad():
                self._work.wait()
                # Rank by rank there are two parts for each lookup: its lengths and its ids. Most
                # may be empty.
                step = 2 * len(self._requests)
                parts: list[list[Tensor]] = [[self._received[:0]] for _ in range(step)]
                places = [place % step for place, size in enumerate(self._sizes) if size]
                for place, part in zip(
                    places, self._received.split(list(filter(None, self._sizes))), strict=True
                ):
                    parts[place].append(part)
                for i, request in enumerate(self._requests):
                    ids = _short(request)
                    ids.arrived = ids.path.arrange(parts[2 * i], parts[2 * i + 1], ids.examples)
            if self._stream is not None:
                self._hand_over(self._stream)
        # Not slices, which would keep the memory as long as this object lives.
        self._work = None
        self._sent = torch.empty(0)
        self._received = torch.empty(0)

    def drop(self) -> None:
        """Wait for what this rank has sent, without sending more: other ranks may not take part."""
        if self._work is not None:
            with self._on_stream():
                self._work.wait()
            self._work = None
        self._was_sent = self._has_arrived = True


@dataclass(frozen=True)
class BothExchanges:
    """The exchanges of a batch of which some lookups go the short path."""

    short: ShortExchange
    long: IdsExchange

    def send_ids(self) -> None:
        """Collective. Send the ids."""
        self.short.send_ids()
        self.long.send_ids()

    def wait(self) -> None:
        """Wait for the ids."""
        self.short.wait()
        self.long.wait()

    def drop(self) -> None:
        """Wait for what has been sent, and send no more."""
        self.short.drop()
        self.long.drop()


def start_exchange(
    requests: list[LookupRequest], stream: Stream = None, group: Any = None
) -> IdsExchange | ShortExchange | BothExchanges:
    """Collective. Start to exchange the ids of these lookups, each on its way; arguments are those
    of IdsExchange."""
    for request in requests:
        # What the ranks know alike: they have agreed on the sizes.
        if request.short is not None and (
            request.sizes is None or not request.sizes[0] == request.sizes[1] > 0
        ):
            request.short = None
    short = [request for request in requests if request.short is not None]
    if not short:
        return IdsExchange(requests, stream=stream, group=group)
    exchange = ShortExchange(short, stream, group)
    if len(short) == len(requests):
        return exchange
    long = [request for request in requests if request.short is None]
    return BothExchanges(exchange, IdsExchange(long, stream=stream, group=group))


def _join_by_rank(tensors: list[Tensor], sizes: list[list[int]]) -> Tensor:
    """Return what each rank gets of all tensors, rank by rank. sizes: of each tensor, for each
    rank."""
    # Ranks without rows get nothing, and take no time of this one: of many ranks that may be most.
    parts = [
        iter(tensor.split(list(filter(None, counts))))
        for tensor, counts in zip(tensors, sizes, strict=True)
    ]
    rank_parts = []
    for counts in zip(*sizes, strict=True):
        rank_parts += [next(part) for part, size in zip(parts, counts, strict=True) if size]
    return torch.cat(rank_parts)


def _short(request: LookupRequest) -> ShortIds:
    assert request.short is not None
    return request.short
