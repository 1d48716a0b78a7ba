"""A slow network in one machine: every all-to-all takes some milliseconds longer, which nobody
spends computing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from lightning_distrec._compat.gloo import tables_dist
from lightning_distrec._compat.patches import Patches


class Exchanges:
    """How many all-to-alls were started."""

    started = 0


class _Late(dist.Work):
    """A request that is done no sooner than `due`; until then its caller may do something else.

    A dist.Work, because torchrec waits for nothing else (torchrec/distributed/dist_data.py,
    SplitsAllToAllAwaitable).
    """

    def __init__(self, work: dist.Work, due: float) -> None:
        super().__init__()
        self._work, self._due = work, due

    def wait(self, *args: Any, **options: Any) -> Any:
        """Wait for the exchange, and for the time that it takes at least."""
        done = self._work.wait(*args, **options)
        time.sleep(max(0.0, self._due - time.perf_counter()))
        return done

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._work.is_completed() and time.perf_counter() >= self._due


@contextmanager
def every_exchange_takes(milliseconds: float) -> Iterator[Exchanges]:
    """Inside of the context each all-to-all takes at least this long from its start; yields their
    number so far."""
    original, exchanges = dist.all_to_all_single, Exchanges()

    def all_to_all_single(*args: Any, async_op: bool = False, **options: Any) -> Any:
        exchanges.started += 1
        if not milliseconds:
            return original(*args, async_op=async_op, **options)
        late = _Late(
            original(*args, async_op=True, **options), time.perf_counter() + milliseconds / 1000
        )
        return late if async_op else late.wait()

    with Patches() as patches:
        for target in (dist, tables_dist):
            patches.replace(target, "all_to_all_single", all_to_all_single)
        yield exchanges
