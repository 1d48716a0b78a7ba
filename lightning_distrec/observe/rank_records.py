"""What each rank measures of itself, how rank 0 gets it without a collective, and what a fit came
to over all ranks."""

import json
import os
import resource
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from lightning_distrec._compat.torch import default_store
from lightning_distrec.spans import (
    BACKWARD,
    WAIT_CONTROL_MESSAGE,
    WAIT_DATA,
    WAIT_INPUT_DIST,
    WAIT_OUTPUT_DIST,
)
from lightning_distrec.units import format_bytes, format_ranks, print_wide, text_table

# What waits for other ranks. A wait for data is a rank's own time: its loader is slow.
WAITS_FOR_RANKS = (WAIT_INPUT_DIST, WAIT_OUTPUT_DIST, WAIT_CONTROL_MESSAGE)
MAX_SHOWN_RANKS = 16


@dataclass
class Totals:
    """Sums over steps of one rank."""

    steps: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    samples: int = 0
    seconds_by_span: dict[str, float] = field(default_factory=dict)
    device_steps: int = 0
    """Steps whose times on a GPU were read."""
    device_seconds: dict[str, float] = field(default_factory=dict)
    """Phase -> sum of these."""
    losses: int = 0
    """Steps that had a loss."""
    loss_sum: float = 0.0

    def add_device(self, seconds: dict[str, float]) -> None:
        """Add a step's times on a GPU; {}: none was read."""
        self.device_steps += bool(seconds)
        for phase, spent in seconds.items():
            self.device_seconds[phase] = self.device_seconds.get(phase, 0.0) + spent

    def add(
        self, seconds: float, cpu_seconds: float, samples: int, seconds_by_span: dict[str, float]
    ) -> None:
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
    def active(self) -> float:
        """Seconds that the rank spent by itself: without waits, and without backward, which waits
        for gradients."""
        return self.seconds - self.waited - self.seconds_by_span.get(BACKWARD, 0.0)

    def ms(self, seconds: float) -> float:
        """Return milliseconds per step."""
        return 1000 * seconds / max(self.steps, 1)

    def times(self) -> dict[str, float]:
        """Return milliseconds per step by name."""
        seconds = {
            "step": self.seconds,
            "own": self.active,
            "wait": self.waited,
            "host_cpu": self.cpu_seconds,
        }
        device = {
            f"device_{k}_ms": 1000 * spent / self.device_steps
            for k, spent in self.device_seconds.items()
        }
        return {f"{name}_ms": self.ms(spent) for name, spent in seconds.items()} | device


@dataclass
class RankRecord:
    """What a rank has measured: since its latest record, and since the fit began."""

    rank: int
    latest: Totals
    fit: Totals
    host: str = field(default_factory=socket.gethostname)
    node: int = 0
    local_rank: int = 0
    device: str = ""
    gpu_use: int | None = None
    """Percent of the time before the record in which the GPU was in use; None: unknown."""
    memory: dict[str, int] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Where the rank is, in words."""
        return f"{self.host} (node {self.node}, local rank {self.local_rank}, {self.device})"

    @property
    def text(self) -> str:
        """The record as JSON, because pickle runs what it reads."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str | bytes) -> "RankRecord":
        """Return a record that was written as JSON."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**{
            **fields,
            "latest": Totals(**fields["latest"]),
            "fit": Totals(**fields["fit"]),
        })


def memory_of_rank(device: torch.device) -> dict[str, int]:
    """Return bytes by name: of this process, and on a GPU those of torch's allocator. Nothing waits
    for the device."""
    with open("/proc/self/statm") as file:
        # the second number: resident pages
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    # ru_maxrss is in KiB on Linux. The kernel's two counts are not exact, and the peak may read
    # lower than the present.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    memory = {"process": resident, "process_peak": max(peak, resident)}
    if device.type == "cuda":
        memory["device_allocated"] = torch.cuda.memory_allocated(device)
        memory["device_reserved"] = torch.cuda.memory_reserved(device)
        memory["device_peak"] = torch.cuda.max_memory_allocated(device)
    return memory


class RecordBoard:
    """Where ranks leave their latest record, and rank 0 reads them; in memory where there is one
    process."""

    def __init__(self, name: str, rank: int) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._num_ranks = dist.get_world_size() if several else 1
        self._store = default_store() if several else dist.HashStore()
        self._name = name
        self._rank = rank

    def put(self, record: RankRecord, kind: str) -> None:
        """Leave a record of a kind, in place of the one before."""
        # Setting a key waits for no other rank, as a collective would.
        self._store.set(self._key(kind, self._rank), record.text)

    def records(self, kind: str, wait_seconds: float = 0.0) -> list[RankRecord]:
        """Return the records that are there, after at most `wait_seconds` until all are."""
        keys = [self._key(kind, rank) for rank in range(self._num_ranks)]
        deadline = time.monotonic() + wait_seconds
        # By `check`, because `get` of a key that is missing waits as long as the process group's
        # timeout.
        while not self._store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.01)
        return [RankRecord.read(self._store.get(key)) for key in keys if self._store.check([key])]

    def missing(self, records: list[RankRecord]) -> list[int]:
        """Return the ranks without a record."""
        return sorted(set(range(self._num_ranks)) - {record.rank for record in records})

    def clear(self) -> None:
        """Take all records away, on rank 0."""
        for kind, rank in product(("latest", "last"), range(self._num_ranks)):
            self._store.delete_key(self._key(kind, rank))

    def _key(self, kind: str, rank: int) -> str:
        return f"{self._name}{kind}/{rank}"


def stragglers(totals: Sequence[Totals], share: float) -> list[int]:
    """Return the places of those whose own time is above the median by more than `share` of a
    step."""
    own_ms = [total.times()["own_ms"] for total in totals]
    step = mean(total.ms(total.seconds) for total in totals)
    # By the median, which one slow rank does not move.
    return [place for place, ms in enumerate(own_ms) if ms - median(own_ms) > share * step]


def rank_numbers(records: Sequence[RankRecord]) -> dict[str, float]:
    """Return name -> number for loggers, from the ranks' latest records."""
    rows = []
    for record in records:
        row = record.latest.times()
        for kind, num_bytes in record.memory.items():
            row[f"{kind}_bytes"] = float(num_bytes)
        if record.gpu_use is not None:
            row["gpu_use_percent"] = float(record.gpu_use)
        rows.append(row)
    numbers: dict[str, float] = {}
    for name in rows[0]:
        # The device of another rank may not have passed a step yet.
        values = [row[name] for row in rows if name in row]
        numbers |= {f"ranks/{name}_max": max(values), f"ranks/{name}_mean": mean(values)}
    slowest = _slowest([record.latest for record in records], records)
    return numbers | {"ranks/slowest_rank": float(slowest)}


def _slowest(totals: Sequence[Totals], records: Sequence[RankRecord]) -> int:
    """Return the rank with the largest own time."""
    own_ms = [total.times()["own_ms"] for total in totals]
    return records[own_ms.index(max(own_ms))].rank


def summarize_ranks(
    records: Sequence[RankRecord], missing: Sequence[int], share: float, readers: int = 1
) -> dict[str, Any]:
    """Return the summary as plain values. missing: ranks without a record. share: see `stragglers`.

    readers: how many ranks read the same samples, as those of a pipeline do.
    """
    fits = [record.fit for record in records]
    seconds = max(fit.seconds for fit in fits)
    span_ms: dict[str, float] = {}
    for fit in fits:
        for name, span_seconds in fit.seconds_by_span.items():
            span_ms[name] = span_ms.get(name, 0.0) + fit.ms(span_seconds) / len(fits)
    step = mean(fit.ms(fit.seconds) for fit in fits)
    records_by_node: dict[int, list[RankRecord]] = {}
    for record in sorted(records, key=lambda record: record.node):
        records_by_node.setdefault(record.node, []).append(record)
    losses = [fit.loss_sum / fit.losses for fit in fits if fit.losses]
    return {
        "ranks": len(records) + len(missing),
        "ranks_without_record": list(missing),
        "steps": max(fit.steps for fit in fits),
        # All ranks' samples over the time of the slowest, for which the others wait.
        "samples_per_second": sum(fit.samples for fit in fits) / readers / seconds
        if seconds
        else 0.0,
        "step_ms": step,
        "mean_loss": mean(losses) if losses else None,
        "data_wait_share": span_ms.get(WAIT_DATA, 0.0) / step if span_ms else None,
        "ms_per_step": {**span_ms, "other": step - sum(span_ms.values())} if span_ms else {},
        "slowest_rank": _slowest(fits, records),
        "stragglers": [records[place].rank for place in stragglers(fits, share)],
        "by_node": list(map(_sum_up_node, records_by_node.values())),
        "by_rank": list(map(_sum_up_rank, records)),
    }


def _sum_up_rank(record: RankRecord) -> dict[str, Any]:
    """Return what a rank has trained and taken, as plain values."""
    return {
        "rank": record.rank,
        "host": record.host,
        "node": record.node,
        "local_rank": record.local_rank,
        "device": record.device,
        "gpu_use": record.gpu_use,
        "steps": record.fit.steps,
        "samples": record.fit.samples,
        **record.fit.times(),
        "memory_bytes": record.memory,
    }


def _sum_up_node(records: Sequence[RankRecord]) -> dict[str, Any]:
    """Return what a node's ranks have trained and taken, as plain values."""
    fits = [record.fit for record in records]
    seconds = max(fit.seconds for fit in fits)
    memory: Counter[str] = Counter()
    for record in records:
        memory.update(record.memory)
    return {
        "node": records[0].node,
        "host": records[0].host,
        "ranks": [record.rank for record in records],
        "samples_per_second": sum(fit.samples for fit in fits) / seconds if seconds else 0.0,
        "own_ms": mean(fit.times()["own_ms"] for fit in fits),
        "memory_bytes": dict(memory),
    }


def print_summary(summary: dict[str, Any]) -> None:
    """Print the summary; of more than MAX_SHOWN_RANKS ranks, those with the largest own time."""
    span_texts = ", ".join(f"{name} {ms:.1f}" for name, ms in summary["ms_per_step"].items())
    sent = sum(summary["bytes_sent_per_step"].values())
    loss = summary["mean_loss"]
    share = summary["data_wait_share"]
    lines = [
        f"{summary['samples_per_second']:,.0f} samples/s, {summary['step_ms']:.1f} ms per step"
    ]
    if share is not None:
        lines.append(f"ranks waited for data {share:.1%} of the time")
    if loss is not None:
        lines.append(f"mean loss of all steps and ranks: {loss:.5g}")
    if span_texts:
        lines.append(f"ms per step, mean of ranks: {span_texts}")
    if sent:
        lines.append(f"{format_bytes(sent)} sent per rank and step")
    slowest = f"most time of its own: rank {summary['slowest_rank']}"
    if summary["stragglers"]:
        slowest += f"; stragglers: rank {format_ranks(summary['stragglers'])}"
    lines.append(slowest)
    if summary["ranks_without_record"]:
        lines.append(f"no record of rank {format_ranks(summary['ranks_without_record'])}")
    for node in summary["by_node"] if len(summary["by_node"]) > 1 else ():
        memory = format_bytes(node["memory_bytes"]["process"])
        speed = f"{node['samples_per_second']:,.0f} samples/s, {node['own_ms']:.1f} ms of their own"
        lines.append(
            f"node {node['node']} ({node['host']}): rank {format_ranks(node['ranks'])}, {speed}, "
            f"{memory}"
        )
    rows = summary["by_rank"]
    if len(rows) > MAX_SHOWN_RANKS:
        rows = sorted(rows, key=lambda row: -row["own_ms"])[:MAX_SHOWN_RANKS]
        lines.append(
            f"{MAX_SHOWN_RANKS} of {summary['ranks']} ranks are shown, those with most time of "
            "their own"
        )
    title = f"Fit over {summary['ranks']} ranks" if summary["ranks"] > 1 else "Fit"
    times = [name for name in rows[0] if name.endswith("_ms")]
    headings = [name.replace("_ms", " ms").replace("host_", "") for name in times]
    headings = ["rank", "host", "node", "local", "device", *headings, *rows[0]["memory_bytes"]]
    text = text_table(
        [heading.replace("_", " ") for heading in headings],
        ["host", "device"],
        title=title,
        caption="\n".join(lines),
    )
    for row in rows:
        place = (str(row[name]) for name in ("rank", "host", "node", "local_rank", "device"))
        milliseconds = (f"{row[name]:.1f}" if name in row else "" for name in times)
        text.add_row(*place, *milliseconds, *map(format_bytes, row["memory_bytes"].values()))
    print_wide(text)
