"""The input dist of several lookups at once: their ids are sent to the ranks that hold the rows.

One exchange of sizes for all lookups, then one of ids. torchrec's train pipelines do the same
(torchrec/distributed/train_pipeline), and its classes are used here. The sizes
are in flight until `send_ids`, the ids until `wait`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter

import torch

from lightning_distrec import spans
from lightning_distrec._compat.torchrec_ids import FusedSplits, defer_ids_exchange, record_stream, weight_routes
from lightning_distrec.sharding.lookup.request import LookupRequest

ABOUT_LOOKUPS = attrgetter("context", "lookup.has_small_ids", "late_weights")


class IdsExchange:
    """Collective. Start to exchange the sizes of these lookups' ids.

    requests: prepared, with `sizes` known where they count; alike on all ranks.
    values: numbers that this rank sends along; `values_of_ranks` returns those of all ranks.
    stream: on which a GPU does this, and prepared the requests, during the computation; None on a CPU.
    group: the process group to use; None: that of the tables, on which all collectives must be in one order.
    """

    def __init__(
        self,
        requests: list[LookupRequest],
        values: tuple[int, ...] = (),
        stream: torch.cuda.Stream | None = None,
        group: object = None,
    ) -> None:
        self._requests = requests
        self._stream = stream
        with self._on_stream(), torch.no_grad(), spans.span(spans.START_INPUT_DIST):
            splits = []
            for request in requests:
                lookup = request.lookup
                lookup.pad(request)
                request.context = lookup.sharded.create_context()
                with defer_ids_exchange(lookup.sharded, group):
                    splits.append(lookup.sharded.input_dist(request.context, request.padded_features))
            contexts, are_small, learned = zip(*map(ABOUT_LOOKUPS, requests), strict=True)
            self._sizes: FusedSplits | None = FusedSplits(splits, contexts, values, are_small, learned)
        self._ids: list[Callable[[], object]] = []

    def values_of_ranks(self) -> list[list[int]] | None:
        """Collective. Wait for the sizes, and return each rank's values; no ids are sent yet.

        None: nothing is exchanged, because every rank has all rows.
        """
        assert self._sizes is not None
        with self._on_stream(), torch.no_grad(), spans.span(spans.WAIT_INPUT_DIST):
            return self._sizes.wait_for_numbers()

    def send_ids(self) -> None:
        """Collective. Wait for the sizes, and send the ids, the first time it is called."""
        if self._sizes is not None:
            sizes, self._sizes = self._sizes, None
            with self._on_stream(), torch.no_grad(), spans.span(spans.START_INPUT_DIST):
                started = sizes.start_ids()
            self._ids = [awaitable.wait for awaitable in started]
            for request, awaitable in zip(self._requests, started, strict=True):
                if request.late_weights is not None:
                    request.weight_routes = weight_routes(awaitable)

    def wait(self) -> None:
        """Wait for the ids of all lookups, and put them into `LookupRequest.ids`, the first time it is called."""
        self.send_ids()
        waits, self._ids = self._ids, []
        if not waits:
            return
        with spans.span(spans.WAIT_INPUT_DIST):
            with self._on_stream(), torch.no_grad():
                for request, wait in zip(self._requests, waits, strict=True):
                    request.ids = wait()
            if self._stream is not None:
                now = torch.cuda.current_stream(self._stream.device)
                now.wait_stream(self._stream)
                for request in self._requests:
                    # The features too: pooling of means and padding read their lengths on the stream of the step.
                    record_stream(request.ids, request.context, request.features, now)
                    if request.distinct is not None:
                        request.distinct.record_stream(now)
                    for route in filter(None, request.weight_routes):
                        route.sent_places.record_stream(now)

    def drop(self) -> None:
        """Wait for what this rank has sent, without sending more: other ranks may not take part."""
        if self._sizes is not None:
            self._sizes.wait_for_numbers()
            self._sizes = None
        waits, self._ids = self._ids, []
        for wait in waits:
            wait()

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
