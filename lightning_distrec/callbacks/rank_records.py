"""What each rank measures of itself, and how rank 0 gets it: by the process group's store, without a collective."""

import json
import os
import resource
import socket
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from lightning_distrec._compat.torch import default_store
from lightning_distrec.spans import BACKWARD, WAIT_CONTROL_MESSAGE, WAIT_INPUT_DIST, WAIT_OUTPUT_DIST

WAITS_FOR_RANKS = (WAIT_INPUT_DIST, WAIT_OUTPUT_DIST, WAIT_CONTROL_MESSAGE)


@dataclass
class Totals:
    """Sums over steps of one rank."""

    steps: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    samples: int = 0
    seconds_by_span: dict[str, float] = field(default_factory=dict)

    def add(self, seconds: float, cpu_seconds: float, samples: int, seconds_by_span: dict[str, float]) -> None:
        """Add a step."""
        self.steps += 1
        self.seconds += seconds
        self.cpu_seconds += cpu_seconds
        self.samples += samples
        for name, spent in seconds_by_span.items():
            self.seconds_by_span[name] = self.seconds_by_span.get(name, 0.0) + spent

    @property
    def waited(self) -> float:
        """Seconds in which the rank waited for others."""
        return sum(self.seconds_by_span.get(name, 0.0) for name in WAITS_FOR_RANKS)

    @property
    def own(self) -> float:
        """Seconds that the rank spent by itself: without waits, and without backward, which waits for gradients."""
        return self.seconds - self.waited - self.seconds_by_span.get(BACKWARD, 0.0)

    def ms(self, seconds: float) -> float:
        """Return milliseconds per step."""
        return 1000 * seconds / max(self.steps, 1)


@dataclass
class RankRecord:
    """What a rank has measured: since its latest record, and since the fit began."""

    rank: int
    latest: Totals
    fit: Totals
    host: str = field(default_factory=socket.gethostname)
    memory: dict[str, int] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str | bytes) -> "RankRecord":
        """Return the record that `json` has written."""
        given: dict[str, Any] = json.loads(text)
        return cls(**{**given, "latest": Totals(**given["latest"]), "fit": Totals(**given["fit"])})

    def json(self) -> str:
        """Return the record as text."""
        return json.dumps(asdict(self))


def memory_of_rank(device: torch.device) -> dict[str, int]:
    """Return bytes by name: of this process, and on a GPU those of torch's allocator. Nothing waits for the device."""
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {"process": resident, "process_peak": max(peak, resident)}
    if device.type == "cuda":
        found["device_allocated"] = torch.cuda.memory_allocated(device)
        found["device_reserved"] = torch.cuda.memory_reserved(device)
        found["device_peak"] = torch.cuda.max_memory_allocated(device)
    return found


class RecordBoard:
    """Where ranks leave their latest record, and rank 0 reads them. One process has it to itself."""

    def __init__(self, name: str, rank: int) -> None:
        self._several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._num_ranks = dist.get_world_size() if self._several else 1
        self._name, self._rank = name, rank
        self._own = ""

    def put(self, record: RankRecord, kind: str) -> None:
        """Leave a record of a kind, in place of the one before."""
        self._own = record.json()
        if self._several:
            default_store().set(self._key(kind, self._rank), self._own)

    def records(self, kind: str, wait_seconds: float = 0.0) -> list[RankRecord]:
        """Return the records that are there, after at most `wait_seconds` until all are."""
        if not self._several:
            return [RankRecord.read(self._own)]
        store, ranks = default_store(), range(self._num_ranks)
        deadline = time.monotonic() + wait_seconds
        while not store.check([self._key(kind, rank) for rank in ranks]) and time.monotonic() < deadline:
            time.sleep(0.01)
        return [
            RankRecord.read(store.get(self._key(kind, rank))) for rank in ranks if store.check([self._key(kind, rank)])
        ]

    def missing(self, records: list[RankRecord]) -> list[int]:
        """Return the ranks without a record."""
        return sorted(set(range(self._num_ranks)) - {record.rank for record in records})

    def clear(self) -> None:
        """Take all records away, on rank 0."""
        if self._several:
            for kind in ("latest", "last"):
                for rank in range(self._num_ranks):
                    default_store().delete_key(self._key(kind, rank))

    def _key(self, kind: str, rank: int) -> str:
        return f"{self._name}{kind}/{rank}"
