"""Counts where the host waits for a GPU: as torch warns of it or, on the device in host memory, as
that reports."""

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
            return
        self._caught = warnings.catch_warnings(record=True)
        self._warnings = self._caught.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def end(self) -> Counter[str]:
        """Return place -> waits there."""
        if self._host_device is not None:
            return self._reported() - self._before
        torch.cuda.set_sync_debug_mode("default")
        self._caught.__exit__(None, None, None)
        waits = [warning for warning in self._warnings if SYNC in str(warning.message)]
        return Counter(
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
        self.waits: Counter[str] = Counter()
        self._first, self._end = first, first + number
        self._counter = HostWaits()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self._first:
            self._counter.begin()
        if batch_idx == self._end:
            self.waits = self._counter.end()
