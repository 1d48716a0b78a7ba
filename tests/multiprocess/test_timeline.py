"""The trace of a sharded fit on two ranks: both ranks, their own spans, on one clock."""

import json
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_distrec import Timeline
from lightning_distrec.spans import INPUT_DIST, OUTPUT_DIST, Span, subscribe
from tests.support.click_model import ClickModel, make_batch, seeded
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.traces import check_tracks, spans_in, steps_in
from tests.support.trainers import make_trainer

SKEW_SECONDS = 1000.0


def _fit(path: str) -> list[Span]:
    """Fit with a trace, and return the spans that this rank emitted. The clock of rank 1 is ahead."""
    rank, _ = rank_and_num_ranks()
    original = time.perf_counter
    time.perf_counter = lambda: original() + SKEW_SECONDS * rank
    emitted: list[Span] = []
    unsubscribe = subscribe(emitted.append)
    try:
        model = seeded(ClickModel, torch.optim.SGD, {"lr": 0.1})
        trainer = make_trainer({"sharding_types": ["row_wise"]}, callbacks=Timeline(path, first_step=2, steps=3))
        trainer.fit(model, DataLoader([make_batch(rank)] * 9, batch_size=None))
    finally:
        unsubscribe()
        time.perf_counter = original
    return emitted


def test_the_trace_holds_the_spans_of_all_ranks_on_one_clock(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    emitted = run_on_warm_ranks(_fit, 2, str(path))
    events = json.loads(path.read_text())["traceEvents"]
    check_tracks(events)
    assert steps_in(events) == {rank: ["step 2", "step 3", "step 4"] for rank in (0, 1)}
    found = spans_in(events)
    for rank in (0, 1):
        mine = [(span.name, pytest.approx(1e6 * span.seconds)) for span in emitted[rank]]
        assert {INPUT_DIST, OUTPUT_DIST} <= {name for name, _ in found[rank]}
        for recorded in found[rank]:
            assert recorded in mine
    begins = {e["pid"]: e["ts"] for e in events if e["name"] == "step 3"}
    assert abs(begins[0] - begins[1]) < 1e6 * SKEW_SECONDS / 100, "the clocks are not aligned"
