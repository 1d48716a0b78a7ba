"""Tries settings while training goes on, and keeps the one whose slowest rank is fastest."""

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table as TextTable
from torch import nn

from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.strategies.data_parallel.gradient_exchange import BATCHES_COPIES, ExchangeSetting

FILE = "ddp_tuned.json"
UNCOUNTED = 2
"""Steps after a change that do not count: DDP orders its buckets anew after the first."""
CAPS_MB = (1, 5, 25, 100)


def candidates(dense_bytes: float = 0) -> list[ExchangeSetting]:
    """Return what is tried; the first is torch's own. dense_bytes: as chosen before."""
    copies = (False, True) if BATCHES_COPIES else (False,)
    caps = sorted(CAPS_MB, key=lambda cap: cap != ExchangeSetting().bucket_cap_mb)
    return [ExchangeSetting(cap, copy, dense_bytes) for copy in copies for cap in caps]


def fingerprint(module: nn.Module, *more: object) -> str:
    """Return what a choice holds for: the parameters, and what else decides how fast they are exchanged."""
    parameters = [(name, list(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()]
    return hashlib.sha256(json.dumps([parameters, *map(str, more)]).encode()).hexdigest()[:16]


def remembered(folder: str, key: str, consensus: Consensus) -> ExchangeSetting | None:
    """Collective. Return what rank 0 finds to have been chosen before, None if nothing was."""
    found = None
    if consensus.rank == 0:
        found = _read(Path(folder) / FILE).get(key)
    (found, *_) = consensus.all_gather(found)
    return None if found is None else ExchangeSetting(**found)


def _read(path: Path) -> dict[str, dict[str, float | bool]]:
    try:
        known = json.loads(path.read_text())
        return {key: asdict(ExchangeSetting(**setting)) for key, setting in known.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # not there, or not ours: it is measured again


def remember(folder: str, key: str, setting: ExchangeSetting) -> None:
    """Write what was chosen, beside what was chosen for others. Rank 0's affair; a folder that cannot be written is
    no reason to fail."""
    path = Path(folder) / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_read(path) | {key: asdict(setting)}, indent=1))
    except OSError:
        return


@dataclass
class Autotune:
    """The trials of a run.

    steps_each: of every candidate, those that count. every: training steps from one exchange to the next. apply:
    collective; trains on with a setting. chosen: told what is kept.
    """

    steps_each: int
    every: int
    consensus: Consensus
    apply: Callable[[ExchangeSetting], None]
    chosen: Callable[[ExchangeSetting], None]
    tried: Sequence[ExchangeSetting] = field(default_factory=candidates)
    clock: Callable[[], float] = time.perf_counter
    slowest: list[float] = field(default_factory=list)
    """Of each candidate so far, the median step of its slowest rank, in seconds."""
    _seconds: list[float] = field(default_factory=list)
    _at: float = 0.0
    _num_steps: int = 0

    @property
    def is_done(self) -> bool:
        """Whether all were tried."""
        return len(self.slowest) == len(self.tried)

    def before_step(self) -> None:
        """Collective where a trial ends, which is at the same step on all ranks."""
        self._num_steps += 1
        if self.is_done or self._num_steps % self.every != 1 % self.every:
            return
        now = self.clock()
        if self._at:
            self._seconds.append(now - self._at)
        self._at = now
        if len(self._seconds) == UNCOUNTED + self.steps_each:
            self._end_trial()

    def _end_trial(self) -> None:
        medians = self.consensus.all_gather(statistics.median(self._seconds[UNCOUNTED:]))
        self.slowest.append(max(medians))
        self._seconds, self._at = [], 0.0
        if not self.is_done:
            self.apply(self.tried[len(self.slowest)])
            return
        best = self.tried[self.slowest.index(min(self.slowest))]
        if best != self.tried[-1]:
            self.apply(best)
        self.chosen(best)

    def report(self) -> None:
        """Print what was tried, and what it took."""
        table = TextTable(title="Exchange of gradients: tried while training")
        for column in ("bucket_cap_mb", "batched_grad_copy", "step of the slowest rank", ""):
            table.add_column(column)
        best = min(self.slowest)
        for setting, seconds in zip(self.tried, self.slowest, strict=True):
            kept = "kept" if seconds == best else ""
            table.add_row(f"{setting.bucket_cap_mb:g}", str(setting.batched_grad_copy), f"{seconds * 1e3:.2f} ms", kept)
        Console().print(table)
