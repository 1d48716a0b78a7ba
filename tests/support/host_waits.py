"""Counts where the host waits for a GPU: as torch warns of it or, on the device in host memory, as
that reports; and there, which operations it is given."""

import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

SYNC = "called a synchronizing"
"""In torch's warnings about waits for a GPU."""


class HostWaits:
    """Waits of the host between `begin` and `end`, by their place in Python."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        """On the device in host memory: operations that were queued, by name."""
        # On the device in host memory, which knows them all. On a GPU, torch does not see waits for
        # events and streams.
        self._host_device: Any = sys.modules.get("host_cuda_runtime")
        self._before: Counter[str] = Counter()
        self._caught: Any = None
        self._warnings: Any = None

    def begin(self) -> None:
        """Count from now on."""
        if self._host_device is not None:
            self._before = self._reported()
            self.operations = self._host_device.calls()
            return
        self._caught = warnings.catch_warnings(record=True)
        self._warnings = self._caught.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def end(self) -> None:
        """Set place -> waits there, and operation -> its number."""
        if self._host_device is not None:
            self.waits = self._reported() - self._before
            self.operations = self._host_device.calls() - self.operations
            return
        torch.cuda.set_sync_debug_mode("default")
        self._caught.__exit__(None, None, None)
        waits = [warning for warning in self._warnings if SYNC in str(warning.message)]
        self.waits = Counter(
            f"{'/'.join(Path(wait.filename).parts[-2:])}:{wait.lineno}" for wait in waits
        )

    def _reported(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for text, place, count in self._host_device.reports("wait"):
            counts[f"{place.partition(' <')[0]} ({text})"] += count
        return counts


class WaitsOfSteps(pl.Callback):
    """Counts the waits of some steps of a fit. first, number: of the steps."""

    def __init__(self, first: int, number: int) -> None:
        self.counter = HostWaits()
        self._first, self._end = first, first + number

    @property
    def waits(self) -> Counter[str]:
        """Place -> waits there."""
        return self.counter.waits

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._first:
            self.counter.begin()
        if batch_idx == self._end:
            self.counter.end()
