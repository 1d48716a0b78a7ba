"""Draws batches ahead of their steps, in the place of Lightning's own fetcher.

What Lightning does to a batch between loader and step (precision, transfer hooks, device) is done here, once, when the
batch is drawn; Lightning's loop then gets it `ReadyBatch`, and takes it out where it would have moved it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from typing_extensions import override

from lightning_distrec import spans
from lightning_distrec._compat.lightning import DataFetcher, combining_mode, loader_states, override_loader_states
from lightning_distrec.pipeline.even_batches import ENDED, FAILED, HAS_BATCH, EndPolicy, EvenLoader, next_of
from lightning_distrec.pipeline.in_flight_batch import InFlightBatch
from lightning_distrec.pipeline.sparse_pipeline import SparsePipeline


class ReadyBatch:
    """A batch that is ready for its step. No container, so that what Lightning does to batches leaves it alone."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


class PrefetchFetcher(DataFetcher):
    """Holds `pipeline.depth` batches, the one of this step among them.

    kind: what the steps are called: "training", "validation", ...
    make_ready: from the loader's batch and its dataloader_idx to a Flight's batch, roots and leaves.
    """

    def __init__(
        self, kind: str, pipeline: SparsePipeline, end: EndPolicy, make_ready: Callable[[InFlightBatch, Any, int], None]
    ) -> None:
        super().__init__()
        self._kind = kind
        self._look_ahead = pipeline
        self._end = end
        self._make_ready = make_ready
        self._queue: deque[InFlightBatch] = deque()
        self._count = 0
        self._num_drawn = 0
        self._more = True
        self._draws_together = False
        self._has_ended = False
        self._loader_states: Any = None

    @override
    def __iter__(self) -> "PrefetchFetcher":
        self.drop()
        with self._ends_agreed_here():
            super().__iter__()
        self._count, self._num_drawn, self._has_ended = 0, 0, False
        self._more = self.length != 0
        self._loader_states = loader_states(self.combined_loader)
        override_loader_states(self.combined_loader, lambda: self._loader_states)
        return self

    @contextmanager
    def _ends_agreed_here(self) -> Iterator[None]:
        """Let loaders of unknown length not agree on their ends themselves, but where each has an end of its own."""
        loaders = [loader for loader in self.combined_loader.flattened if isinstance(loader, EvenLoader)]
        if len(self.combined_loader.flattened) > 1 and combining_mode(self.combined_loader) != "min_size":
            # One that ends is begun again, left out, or followed by the next one: each has an end of its own.
            self._draws_together, loaders = bool(loaders), []
        for loader in loaders:
            loader.agrees = False
        try:
            yield
        finally:
            for loader in loaders:
                loader.agrees = True

    @override
    def __next__(self) -> Any:
        """Collective. Return the next batch, its index and its loader's.

        Raises StopIteration where not every rank has another one, or DataError as `EndPolicy` says.
        """
        self._look_ahead.finish_step()
        if self.length is not None and self.fetched >= self.length:
            self.done = True
            raise StopIteration
        self._start_profiler()
        try:
            flight = self._next_flight()
        finally:
            self._stop_profiler()
        self.fetched += 1
        self._count += 1
        self._loader_states = flight.loader_states
        counted = self.length is not None and self.fetched >= self.length
        if self.length is None and self._queue and self._look_ahead.settle(self._queue[0]).state == ENDED:
            self._end_together()  # now: Lightning does not ask again after the last batch
        self.done = counted or self._has_ended
        self._look_ahead.arm(flight, list(self._queue))
        return ReadyBatch(flight.batch), *flight.handed_out

    def _next_flight(self) -> InFlightBatch:
        with spans.span(spans.WAIT_DATA):
            self._fill(1)
        if not self._queue:
            raise StopIteration
        if self._look_ahead.settle(self._queue[0]).state < HAS_BATCH:
            self._end_together()
            raise StopIteration
        flight = self._queue.popleft()
        with spans.span(spans.WAIT_DATA):
            self._fill(self._look_ahead.depth - 1)
        return flight

    def _end_together(self) -> None:
        """Collective. Not every rank has a batch like the first of the queue. Raises DataError as `EndPolicy` does."""
        self.done = True
        if not self._has_ended:
            self._has_ended = True
            self._end.together(self._count, self._queue[0].state, self._queue[0].failure)

    def _fill(self, size: int) -> None:
        while len(self._queue) < size and self._more:
            flight = self._draw()
            self._more = self._has_more_after(flight)
            self._queue.append(flight)
            self._look_ahead.prepare(flight)

    def _has_more_after(self, flight: InFlightBatch) -> bool:
        """Whether to draw another one; collective where loaders agree when they are drawn from.

        None is drawn that has no step: a stream would go on behind it in the next epoch.
        """
        self._num_drawn += 1
        if self.length is not None and self._num_drawn >= self.length:
            return False
        state = (
            self._look_ahead.ranks.start_all_reduce_min(flight.state).wait()[0]
            if self._draws_together
            else flight.state
        )
        return state == HAS_BATCH

    def _draw(self) -> InFlightBatch:
        assert self.iterator is not None
        with torch.inference_mode(False):  # inside, writes in place are not counted
            return self._drawn(*next_of(self.iterator))

    def _drawn(self, state: int, drawn: Any, failure: Exception | None) -> InFlightBatch:
        batch, batch_idx, dataloader_idx = drawn if state == HAS_BATCH else (None, 0, 0)
        flight = InFlightBatch(f"{self._kind} {dataloader_idx}", state, failure)
        flight.handed_out = (batch_idx, dataloader_idx)
        flight.loader_states = loader_states(self.combined_loader)
        if state == HAS_BATCH:
            try:
                self._make_ready(flight, batch, dataloader_idx)
            except Exception as error:
                flight.state, flight.failure = FAILED, error
        return flight

    def drop(self) -> None:
        """Forget the batches that were drawn ahead."""
        self._look_ahead.drop(list(self._queue))
        self._queue.clear()

    @override
    def teardown(self) -> None:
        self.drop()
        if self._combined_loader is not None:
            override_loader_states(self._combined_loader, None)
        super().teardown()
