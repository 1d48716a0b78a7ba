"""Which rows a batch has: each row of an epoch once, over all ranks and workers, from any position
on.

An epoch is one order of all rows: row groups in random order, neighbours joined to windows of
`buffer_rows` rows or more, and the rows of a window in random order. Each rank has a run of that
order, and each worker a run of its rank's, so that a row group is read by one worker, or by those
on whose border it lies. A position is what remains of the order, which any number of ranks and
workers can share out again.
"""

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_distrec.errors import DataError

Span = tuple[int, int]
"""Places in an epoch's order: the first, and the one after the last."""


class Request(NamedTuple):
    """What a worker makes a batch of."""

    epoch: int
    spans: list[Span]


class Window(NamedTuple):
    """Row groups whose rows are shuffled with each other."""

    epoch: int
    number: int
    groups: list[int]
    num_rows: int


class RowOrder:
    """The order of all rows in each epoch. counts: rows of each row group."""

    def __init__(self, counts: list[int], *, shuffle: bool, seed: int, buffer_rows: int) -> None:
        self.counts = counts
        self.shuffle = shuffle
        self.seed = seed
        self.buffer_rows = buffer_rows
        self.num_rows = sum(counts)
        self._epoch = -1
        self._windows: list[Window] = []
        self._starts = [0]

    def begin(self, epoch: int) -> None:
        """Order the row groups for this epoch."""
        if epoch == self._epoch:
            return
        groups = list(range(len(self.counts)))
        if self.shuffle:
            groups = np.random.default_rng([self.seed, epoch]).permutation(groups).tolist()
        windows: list[Window] = []
        for group in groups:
            if not windows or windows[-1].num_rows >= self.buffer_rows or not self.shuffle:
                windows.append(Window(epoch, len(windows), [], 0))
            last = windows.pop()
            last.groups.append(group)
            windows.append(last._replace(num_rows=last.num_rows + self.counts[group]))
        self._epoch = epoch
        self._windows = windows
        self._starts = [0, *accumulate(window.num_rows for window in windows)]

    def parts(self, request: Request) -> Iterator[tuple[Window, Span]]:
        """Yield the windows of a batch, and which of their rows it has."""
        self.begin(request.epoch)
        for first, stop in request.spans:
            while first < stop:
                number = bisect_right(self._starts, first) - 1
                begin, end = self._starts[number : number + 2]
                until = min(stop, end)
                yield self._windows[number], (first - begin, until - begin)
                first = until

    def rows(self, window: Window) -> np.ndarray | None:
        """Return the order of a window's rows, of any epoch; None: as they are."""
        random = np.random.default_rng([self.seed, window.epoch, window.number])
        return random.permutation(window.num_rows) if self.shuffle else None


class Shares:
    """How the rows of `spans` become batches of ranks and workers; each rank has as many, of at
    least one row each."""

    def __init__(
        self, spans: list[Span], num_ranks: int, num_workers: int, batch_size: int
    ) -> None:
        self.spans = spans
        self.batch_size = batch_size
        self.num_ranks = num_ranks
        self.num_workers = num_workers
        self._starts = [0, *accumulate(stop - first for first, stop in spans)]
        self.num_rows = self._starts[-1]
        self.num_batches = _ceil(_ceil(self.num_rows, num_ranks), batch_size)

    def layout(self) -> tuple[int, int, int]:
        """Return how many ranks, workers of each and rows of a batch there are."""
        return self.num_ranks, self.num_workers, self.batch_size

    def _edge(self, rank: int, batch: int) -> int:
        """Return where a batch of a rank begins; the batch after its last one: where its share
        ends."""
        first = self.num_rows * rank // self.num_ranks
        stop = self.num_rows * (rank + 1) // self.num_ranks
        if stop - first < self.num_batches:  # one row short: it is its neighbour's, too
            if stop < self.num_rows:
                stop += 1
            else:
                first -= 1
        # The last batches have a row each where there are not enough for full ones.
        remaining_batches = self.num_batches - batch
        return min(first + batch * self.batch_size, stop - remaining_batches)

    def _block(self, worker: int) -> Span:
        """Return the batches of a worker, in the order of the rank's rows."""
        size, extra = divmod(self.num_batches, self.num_workers)
        first = worker * size + min(worker, extra)
        return first, first + size + (worker < extra)

    def batch(self, rank: int, number: int) -> list[Span]:
        """Return the places of the batch that a rank gets as its `number`-th: workers take
        turns."""
        worker = number % self.num_workers
        turn = number // self.num_workers
        position = self._block(worker)[0] + turn
        return self._places(self._edge(rank, position), self._edge(rank, position + 1))

    def remaining(self, num_batches: int) -> list[Span]:
        """Return what is left in the order after each rank got this many batches."""
        spans: list[Span] = []
        for rank in range(self.num_ranks):
            for worker in range(self.num_workers):
                first, stop = self._block(worker)
                # Workers take turns, so that the first ones may have given a batch more.
                num_given = _ceil(num_batches - worker, self.num_workers)
                first = min(stop, first + num_given)
                spans += self._places(self._edge(rank, first), self._edge(rank, stop))
        merged: list[Span] = []
        for first, stop in sorted(spans):
            if merged and first <= merged[-1][1]:
                before, end = merged.pop()
                first = before
                stop = max(stop, end)
            merged.append((first, stop))
        return merged

    def _places(self, first: int, stop: int) -> list[Span]:
        """Return the places in the epoch's order of a run of this share's rows."""
        places = []
        number = bisect_right(self._starts, first) - 1
        while first < stop:
            begin = self.spans[number][0] + first - self._starts[number]
            size = min(stop, self._starts[number + 1]) - first
            places.append((begin, begin + size))
            first = first + size
            number = number + 1
        return places


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)


class RowSampler(DistributedSampler):
    """Yields the requests of this rank. Lightning leaves a DistributedSampler as it is, and sets
    its epoch."""

    def __init__(
        self, order: RowOrder, num_ranks: int, rank: int, num_workers: int, batch_size: int
    ) -> None:
        rows: Any = range(order.num_rows)
        super().__init__(
            rows,
            num_ranks,
            rank,
            shuffle=order.shuffle,
            seed=order.seed,
        )
        self.order = order
        self.full = self.shares = Shares(
            [(0, order.num_rows)], num_ranks, max(1, num_workers), batch_size
        )
        self.num_trained = 0
        """Batches of `shares` that the next iterator leaves out."""
        if order.num_rows < num_ranks:
            raise DataError(
                f"{order.num_rows} rows are too few for {num_ranks} ranks: each needs one."
            )

    def __len__(self) -> int:
        return self.full.num_batches

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        shares = self.shares
        first = self.num_trained
        self.shares = self.full
        self.num_trained = 0
        for number in range(first, shares.num_batches):
            yield Request(epoch, shares.batch(self.rank, number))


class RowLoader(DataLoader[Any]):
    """A DataLoader over a RowSampler that continues in the middle of an epoch, on any number of
    ranks and workers.

    `state` has the keys of positions that strategies read. `len` stays that of full epochs.
    """

    state: dict[str, Any] = {}
    """Where the iterator is that was begun last."""
    next_state: dict[str, Any] | None = None
    """Where the next one begins."""
    source: str = ""
    """Differs where rows are others, though their groups are of the same sizes."""

    def _beginning(self) -> dict[str, Any]:
        sampler: Any = self.sampler
        order = sampler.order
        shares = sampler.full
        rows = np.array(order.counts).tobytes() + self.source.encode()
        return {
            "batches": 0,
            "samples": 0,
            "rank": sampler.rank,
            "num_ranks": shares.num_ranks,
            "batch_size": shares.batch_size,
            "length": order.num_rows,
            "drop_last": False,
            "drop_uneven": False,
            "order": ["rows", order.buffer_rows, crc32(rows)],
            "generator": None,
            "of_epoch": [sampler.epoch, order.seed, order.shuffle],
            "num_workers": shares.num_workers,
            "first_batch": 0,
            "spans": shares.spans,
        }

    def row_indices(self, batch: int) -> list[int]:
        """Return the rows of this rank's batch in a loader without shuffling, of all rows of its
        source."""
        sampler: Any = self.sampler
        return [row for span in sampler.full.batch(sampler.rank, batch) for row in range(*span)]

    def state_dict(self) -> dict[str, Any]:
        return self.state or self._beginning()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator begin at `state`; warn, and begin an epoch, where it is of other
        rows."""
        beginning = self._beginning()
        self.state = beginning
        self.next_state = None
        if any(state.get(name) != beginning[name] for name in ("length", "order")) or (
            list(state["of_epoch"][1:]) != beginning["of_epoch"][1:]
        ):
            rank_zero_warn(
                "resuming in the middle of an epoch: the checkpoint is of other rows, of other row "
                "groups, or of another seed, buffer_rows or shuffling. So an epoch of all rows "
                "begins. To go on where it was, resume with the same data and settings."
            )
            return
        spans = [(first, stop) for first, stop in state["spans"]]
        before = Shares(
            spans,
            state["num_ranks"],
            state["num_workers"],
            state["batch_size"],
        )
        num_trained = max(0, state["batches"] - state["first_batch"])
        # In another layout rows may have been trained and as many batches be left as an epoch has.
        if num_trained >= before.num_batches or not (state["batches"] or state["samples"]):
            return
        sampler: Any = self.sampler
        full = sampler.full
        # In the same layout workers go on taking turns where they were.
        position = {**state, "rank": sampler.rank}
        if before.layout() != full.layout():
            shares = Shares(before.remaining(num_trained), *full.layout())
            first_batch = full.num_batches - shares.num_batches
            position = {
                **beginning,
                **{"batches": first_batch, "first_batch": first_batch, "spans": shares.spans},
                "samples": full.num_rows - shares.num_rows,
                "of_epoch": state["of_epoch"],
            }
        self.state = self.next_state = position

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator: it begins with its first batch, when Lightning has set the sampler's epoch.
        sampler: Any = self.sampler
        state = self.next_state
        self.next_state = None
        if state is None or state["of_epoch"][0] != sampler.epoch:
            state = self._beginning()
        full = sampler.full
        sampler.shares = Shares(state["spans"], *full.layout())
        sampler.num_trained = state["batches"] - state["first_batch"]
        dataset: Any = self.dataset
        pins = self.pin_memory and torch.accelerator.is_available()
        if self.pin_memory and not pins:
            rank_zero_warn("pin_memory=True: there is no accelerator, so batches are not pinned.")
        global_batch = full.batch_size * full.num_ranks
        # Threads, where a DataLoader has processes: pyarrow and numpy let others run meanwhile, and
        # a batch need not be sent.
        for tensors in dataset.batches(iter(sampler), self.num_workers):
            if pins:
                tensors = {name: tensor.pin_memory() for name, tensor in tensors.items()}
            samples = min(state["samples"] + global_batch, full.num_rows)
            state = {**state, "batches": state["batches"] + 1, "samples": samples}
            self.state = state
            yield dataset.columns.batch(tensors)
