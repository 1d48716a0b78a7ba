"""Builds a trace of spans in Chrome's trace event format, which Perfetto and chrome://tracing open.

Source: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU (Trace Event Format).
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lightning_distrec.callbacks.steps import Step
from lightning_distrec.spans import CONCURRENT, Span

Event = dict[str, Any]
COMPUTE = "compute and wait"
"""Name of the track of spans that the rank spends its own time in."""


def trace_events(rank: int, steps: Sequence[Step], first_step: int, spans: Iterable[Span], zero: float) -> list[Event]:
    """Return the events of one rank: pid is the rank, tid a track of what runs at the same time.

    first_step: number of the first of `steps`. zero: the moment of this rank's clock at which the trace begins.
    """
    spans = list(spans)
    tracks: list[tuple[str, list[Span]]] = [
        ("steps", [Span(f"step {first_step + number}", step.begin, step.end) for number, step in enumerate(steps)]),
        *((COMPUTE, track) for track in _tracks((s for s in spans if s.name not in CONCURRENT), nested=True)),
    ]
    for name in CONCURRENT:
        tracks += [(name, track) for track in _tracks((s for s in spans if s.name == name), nested=False)]
    events: list[Event] = [
        _metadata("process_name", rank, 0, name=f"rank {rank}"),
        _metadata("process_sort_index", rank, 0, sort_index=rank),
    ]
    for tid, (name, track) in enumerate(tracks):
        events += [
            _metadata("thread_name", rank, tid, name=name),
            _metadata("thread_sort_index", rank, tid, sort_index=tid),
        ]
        events += [_complete_event(span, rank, tid, name, zero) for span in track]
    return events


def _metadata(key: str, rank: int, tid: int, **arguments: Any) -> Event:
    return {"ph": "M", "name": key, "pid": rank, "tid": tid, "args": arguments}


def _complete_event(span: Span, rank: int, tid: int, category: str, zero: float) -> Event:
    microseconds = {"ts": 1e6 * (span.begin - zero), "dur": 1e6 * span.seconds}
    return {"ph": "X", "name": span.name, "cat": category, "pid": rank, "tid": tid, **microseconds}


def _tracks(spans: Iterable[Span], nested: bool) -> list[list[Span]]:
    """Distribute spans over tracks. In a track they follow one another; with `nested`, one may lie inside another.

    The format demands it: spans of a track that overlap otherwise are drawn wrongly.
    """
    tracks: list[tuple[list[Span], list[Span]]] = []  # all spans of the track, and those that are open
    for span in sorted(spans, key=lambda s: (s.begin, -s.end)):
        for _, stack in tracks:
            while stack and stack[-1].end <= span.begin:
                stack.pop()
        free = (each for each in tracks if not each[1] or (nested and span.end <= each[1][-1].end))
        chosen = next(free, None)
        if chosen is None:
            tracks.append(chosen := ([], []))
        for spans_of_track in chosen:
            spans_of_track.append(span)
    return [track for track, _ in tracks]


def align_clocks(device: torch.device, rounds: int = 5) -> float:
    """Collective. Return a moment of this rank's time.perf_counter that is the same moment on all ranks.

    All ranks leave a blocking all-reduce at nearly the same time, so the median difference over some rounds is the
    offset between two clocks, to within the time of such an exchange (tens of microseconds to a millisecond).
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return time.perf_counter()
    moments = []
    for _ in range(rounds):
        token = torch.zeros(1, device=device)
        dist.all_reduce(token)
        token.item()  # waits for a GPU
        moments.append(time.perf_counter())
    mine = torch.tensor(moments, dtype=torch.float64, device=device)
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, mine)
    return float(gathered[0][0]) + float((mine - gathered[0]).median())
