"""Draws batches ahead of their steps, in the place of Lightning's own fetcher; on a GPU, on streams
of their own.

What Lightning does to a batch between loader and step (precision, transfer hooks, device) is done
when the batch is drawn. Lightning's loop then gets a `ReadyBatch`, which the strategy unpacks where
it would have moved the batch.

On a GPU batches are copied from pinned memory on one CUDA stream, and their ids are exchanged on
another. Not run on a GPU yet, but on tests/support/host_cuda. Without a GPU there is nothing of it:
gloo threads work during the computation by themselves.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torchrec.streamable import Pipelineable
from typing_extensions import override

from lightning_distrec import gpu, spans
from lightning_distrec._compat.lightning import DataFetcher
from lightning_distrec._compat.lightning_data import (
    combining_mode,
    loader_states,
    override_loader_states,
)
from lightning_distrec._compat.tensors import parts_of
from lightning_distrec.prefetch.batch_objects import tensors_in
from lightning_distrec.prefetch.even_batches import (
    ENDED,
    FAILED,
    HAS_BATCH,
    EndPolicy,
    EvenLoader,
    Repeated,
    draw_next,
)
from lightning_distrec.prefetch.in_flight_batch import InFlightBatch
from lightning_distrec.prefetch.prefetcher import Prefetcher


class ReadyBatch:
    """A batch that is ready for its step. It is no container, so that Lightning's conversions leave
    it alone."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch


class PrefetchFetcher(DataFetcher):
    """Holds `prefetch.depth` batches, the one of this step among them.

    kind: what the steps are called: "training", "validation", ...
    make_ready: fills an InFlightBatch from the loader's batch and its dataloader_idx.
    """

    def __init__(
        self,
        kind: str,
        prefetcher: Prefetcher,
        end: EndPolicy,
        make_ready: Callable[[InFlightBatch, Any, int], None],
    ) -> None:
        super().__init__()
        self._kind = kind
        self._prefetcher = prefetcher
        self._end = end
        self._make_ready = make_ready
        self._queue: deque[InFlightBatch] = deque()
        self._num_drawn = 0
        self._has_more = True
        self._agrees_on_draws = False
        self._has_ended = False

    @override
    def __iter__(self) -> "PrefetchFetcher":
        self.drop()
        loaders = [
            loader for loader in self.combined_loader.flattened if isinstance(loader, EvenLoader)
        ]
        if (
            len(self.combined_loader.flattened) > 1
            and combining_mode(self.combined_loader) != "min_size"
        ):
            # Each has an end of its own: Lightning restarts it then, leaves it out, or goes on with
            # the next one.
            self._agrees_on_draws = bool(loaders)
            loaders = []
        # Iterators that begin now leave it to this fetcher to agree: its messages carry the state
        # of each batch.
        for loader in loaders:
            loader.agrees = False
        try:
            super().__iter__()
        finally:
            for loader in loaders:
                loader.agrees = True
        self._num_drawn = 0
        self._has_ended = False
        self._has_more = self.length != 0
        # Not asked for before the first batch: torchdata's loader would begin, and draw seeds.
        override_loader_states(self.combined_loader, None)
        return self

    @override
    def __next__(self) -> Any:
        """Collective. Return the next batch, its index and its loader's. Raises DataError as
        `EndPolicy` does."""
        # First: where the last step has failed on another rank this raises, and no loader is drawn
        # from.
        self._prefetcher.finish_step()
        if self.length is not None and self.fetched >= self.length:
            self.done = True
            raise StopIteration
        self._start_profiler()
        try:
            in_flight = self._next_batch()
        finally:
            self._stop_profiler()
        self.fetched += 1
        # A checkpoint in this step resumes after this batch, though later ones were drawn from the
        # loaders.
        self._save_states(in_flight)
        counted = self.length is not None and self.fetched >= self.length
        if (
            self.length is None
            and self._queue
            and self._prefetcher.agreed_status(self._queue[0]).state == ENDED
        ):
            self._end_epoch()  # now: Lightning does not ask again after the last batch
        self.done = counted or self._has_ended
        self._prefetcher.current = in_flight
        self._prefetcher.following = list(self._queue)
        ready = ReadyBatch(in_flight.batch)
        return Repeated(ready) if in_flight.is_repeated else ready, *in_flight.indices

    def _next_batch(self) -> InFlightBatch:
        with spans.span(spans.WAIT_DATA):
            self._fill(1)
        if not self._queue:
            raise StopIteration
        if self._prefetcher.agreed_status(self._queue[0]).state < HAS_BATCH:
            self._end_epoch()
            raise StopIteration
        in_flight = self._queue.popleft()
        with spans.span(spans.WAIT_DATA):
            self._fill(self._prefetcher.depth - 1)
        return in_flight

    def _end_epoch(self) -> None:
        """Collective. End the epoch where not every rank has another batch. Raises DataError as
        `EndPolicy` does."""
        self.done = True
        # Lightning may ask again after the end; `apply` is collective, and warns.
        if not self._has_ended:
            self._has_ended = True
            self._save_states(self._queue[0])
            self._end.apply(self.fetched, self._queue[0].state, self._queue[0].failure)

    def _save_states(self, in_flight: InFlightBatch) -> None:
        override_loader_states(self.combined_loader, lambda: in_flight.loader_states)

    def _fill(self, size: int) -> None:
        while len(self._queue) < size and self._has_more:
            in_flight = self._draw()
            self._has_more = self._has_more_after(in_flight)
            self._queue.append(in_flight)
            self._prefetcher.prepare(in_flight)

    def _has_more_after(self, in_flight: InFlightBatch) -> bool:
        """Return whether to draw another batch; collective where loaders agree when they are drawn
        from.

        No batch is drawn that will have no step: a stream would continue after it in the next
        epoch.
        """
        self._num_drawn += 1
        if self.length is not None and self._num_drawn >= self.length:
            return False
        state = in_flight.state
        if self._agrees_on_draws:
            # Every rank draws until the first batch that some rank lacks, so that all of them come
            # here together.
            state = self._prefetcher.ranks.all_reduce_min(state)
        return state == HAS_BATCH

    def _draw(self) -> InFlightBatch:
        assert self.iterator is not None
        # In inference mode torch does not count writes in place, by which changed inputs are
        # noticed.
        with torch.inference_mode(False):
            state, drawn, failure = draw_next(self.iterator)
            batch, batch_idx, dataloader_idx = drawn if state == HAS_BATCH else (None, 0, 0)
            in_flight = InFlightBatch(f"{self._kind} {dataloader_idx}", state, failure)
            in_flight.indices = (batch_idx, dataloader_idx)
            in_flight.loader_states = loader_states(self.combined_loader)
            if state == HAS_BATCH:
                if isinstance(batch, Repeated):
                    batch = batch.batch
                    in_flight.is_repeated = True
                try:
                    self._make_ready(in_flight, batch, dataloader_idx)
                except Exception as error:  # raised when its step is due, and on all ranks
                    in_flight.state = FAILED
                    in_flight.failure = error
            return in_flight

    def drop(self) -> None:
        """Forget the batches that were prefetched."""
        self._prefetcher.drop(list(self._queue))
        self._queue.clear()

    @override
    def teardown(self) -> None:
        self.drop()
        if self._combined_loader is not None:
            override_loader_states(self._combined_loader, None)
        super().teardown()


class Streams:
    """The streams of one rank. device: that of the steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.on_gpu = on_gpu = gpu.is_gpu(device)
        """Whether there are streams."""
        self._copies = torch.cuda.Stream(device) if on_gpu else None
        # High priority: its small kernels must not queue behind those of the forward.
        self.ids = torch.cuda.Stream(device, priority=-1) if on_gpu else None
        """On which ids are checked and exchanged; None on a CPU."""

    def copying(self, drawn: Any) -> AbstractContextManager[Any]:
        """Return the context in which a batch is copied. drawn: as the loader gave it."""
        if self._copies is None:
            return nullcontext()
        on_device = self._on_device(drawn)
        if on_device:  # a loader on the GPU: its kernels are in the stream that was current
            self._copies.wait_stream(torch.cuda.current_stream(self._device))
            for tensor in on_device:
                tensor.record_stream(self._copies)
        return torch.cuda.stream(self._copies)

    def preparing(self, reads_written_tensors: Callable[[], bool]) -> AbstractContextManager[None]:
        """Return the context in which ids are computed and checked, after `copied` was called with
        their batch.

        reads_written_tensors: whether they depend on tensors that the stream of the step writes to.
        """
        if self.ids is None:
            return nullcontext()
        return self._preparing_on(self.ids, reads_written_tensors())

    @contextmanager
    def _preparing_on(self, ids: torch.cuda.Stream, is_ordered: bool) -> Iterator[None]:
        step = torch.cuda.current_stream(self._device)
        if is_ordered:
            ids.wait_stream(step)
        with torch.cuda.stream(ids):
            yield
        if is_ordered:  # the step's next write comes after these reads
            step.wait_stream(ids)

    def copied(self, batch: Any) -> Any:
        """Let the stream of ids use a batch that was copied; returns the event that `hand_over`
        waits for."""
        if self._copies is None or self.ids is None:
            return None
        # The allocator must not give this memory away while kernels on the stream of ids may still
        # read it.
        event = self._copies.record_event()
        self.ids.wait_event(event)
        for tensor in self._on_device(batch):
            tensor.record_stream(self.ids)
        return event

    def hand_over(self, batch: Any, copied: Any) -> None:
        """Let the stream of the step use the batch from now on."""
        if copied is None:
            return
        stream = torch.cuda.current_stream(self._device)
        # The copies' stream has allocated the memory, and could use it again while kernels of the
        # step still read it.
        stream.wait_event(copied)
        for tensor in self._on_device(batch):
            tensor.record_stream(stream)

    def _on_device(self, batch: Any) -> list[Tensor]:
        parts: list[Tensor] = []
        for tensor in tensors_in(batch):
            if gpu.is_on_gpu(tensor):
                parts += parts_of(tensor)
        return parts


@runtime_checkable
class Pinnable(Protocol):
    """A tensor, a KeyedJaggedTensor, or what defines pin_memory for DataLoaders."""

    def pin_memory(self) -> Any:
        """Return a copy in pinned memory."""


def pin(batch: Any) -> Any:
    """Return the batch with its dense tensors on the host pinned, in dicts, lists, tuples and
    dataclasses."""
    return apply_to_collection(batch, Pinnable, _pin, allow_frozen=True)


def _pin(data: Any) -> Any:
    tensors = [data] if isinstance(data, Tensor) else tensors_in(data)
    can_be = all(
        tensor.is_cpu and tensor.layout == torch.strided and not tensor.is_nested
        for tensor in tensors
    )
    return data.pin_memory() if can_be else data


def move_jagged(batch: Any, device: torch.device) -> Any:
    """Return the batch with KeyedJaggedTensors copied to the device, for which Lightning's
    `to(device)` would wait."""
    return apply_to_collection(
        batch, Pipelineable, lambda data: data.to(device, non_blocking=True), allow_frozen=True
    )
