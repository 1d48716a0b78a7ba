"""The ids of several lookups travel together: one exchange of sizes for all, then the ids.

torchrec's train pipelines exchange so (torchrec/distributed/train_pipeline), and its parts are used here. The sizes
travel until `send`, the ids until `arrive`.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from lightning_distrec import spans
from lightning_distrec._compat.torchrec import FusedSplits, defer_ids_exchange, record_stream
from lightning_distrec.sharding.lookup.request import LookupRequest


class IdsExchange:
    """Collective. Begin to exchange the sizes of these lookups' ids.

    requests: prepared, with `sizes` known where they count; alike on all ranks.
    say: what this rank tells the others beside; `send` returns what all have said.
    stream: where a GPU does this, beside the computation, and did prepare the requests; None on a CPU.
    group: the process group to use; None: that of the tables, on which all that ranks do must be in one order.
    """

    def __init__(
        self,
        requests: list[LookupRequest],
        say: tuple[int, ...] = (),
        stream: torch.cuda.Stream | None = None,
        group: object = None,
    ) -> None:
        self._requests = requests
        self._stream = stream
        self._begin = time.perf_counter()
        with self._aside(), torch.no_grad(), spans.span(spans.START_INPUT_DIST):
            splits = []
            for request in requests:
                lookup = request.lookup
                lookup.pad(request)
                request.context = lookup.sharded.create_context()
                with defer_ids_exchange(lookup.sharded, group):
                    splits.append(lookup.sharded.input_dist(request.context, request.sent))
            self._sizes: FusedSplits | None = FusedSplits(splits, [request.context for request in requests], say)
        self._said: list[list[int]] | None = None
        self._ids: list[Callable[[], object]] = []

    def send(self) -> list[list[int]] | None:
        """Collective. Wait for the sizes, and let the ids travel; when called again it does not.

        Return what each rank has said; None where nothing is exchanged, as every rank has all rows.
        """
        if self._sizes is not None:
            sizes, self._sizes = self._sizes, None
            with self._aside(), torch.no_grad(), spans.span(spans.START_INPUT_DIST):
                awaitables, self._said = sizes.wait()
                self._ids = [awaitable.wait for awaitable in awaitables]
        return self._said

    def arrive(self) -> None:
        """Wait for the ids of all lookups; they are in `LookupRequest.ids` then. Does nothing when called again."""
        self.send()
        waits, self._ids = self._ids, []
        if not waits:
            return
        spans.emit(spans.INPUT_DIST, self._begin, time.perf_counter())
        with spans.span(spans.WAIT_INPUT_DIST):
            with self._aside(), torch.no_grad():
                for request, wait in zip(self._requests, waits, strict=True):
                    request.ids = wait()
            if self._stream is not None:
                now = torch.cuda.current_stream(self._stream.device)
                now.wait_stream(self._stream)
                for request in self._requests:
                    record_stream(request.ids, request.context, now)

    def drop(self) -> None:
        """Wait for what this rank has sent, without sending more: other ranks may not come."""
        if self._sizes is not None:
            self._sizes.drop()
            self._sizes = None
        waits, self._ids = self._ids, []
        for wait in waits:
            wait()

    def _aside(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
