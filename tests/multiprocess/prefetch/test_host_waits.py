"""What a step asks of a GPU, counted on CUDA devices in host memory, beside TorchRec's own pipeline:
waits of the host, operations, exchanges and copies."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.console import finished
from tests.support.counted_steps import BATCH_TENSORS, totals
from tests.support.host_cuda.runs import ROOT, variables_or_skip

TORCHREC, BY_HAND = "TorchRec", "TorchRec, not prefetched"
LIMITS = {"prefetched": 1, "prefetched, logged": 1, "rows sent once": 14}
"""Waits in a step, contender by contender. On the short path there is one, for all numbers of a
batch's ids.

Of the last one, two are for different ids, however many features there are, and one is the model's
own.
"""


@pytest.mark.slow
def test_a_step_asks_no_more_of_a_gpu_than_torchrecs_pipeline(tmp_path: Path) -> None:
    path, environ = tmp_path / "steps.json", variables_or_skip(devices=2)
    names = [*LIMITS, "not prefetched", TORCHREC, BY_HAND]
    command = [sys.executable, "-m", "tests.support.counted_steps", str(path), *names]
    done = finished(command, ROOT, env=environ)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(path.read_text())
    rows = totals(counts)
    for name, limit in LIMITS.items():
        waits = rows[name]["waits in forward"]
        assert 0 < waits <= limit <= rows[TORCHREC]["waits in forward"], counts[name]["waits"]
    waits = rows["not prefetched"]["waits in forward"]
    assert waits <= rows[BY_HAND]["waits in forward"], counts["not prefetched"]["waits"]
    for column in ("operations", "exchanges", "copies to the device", "waits in backward"):
        assert 0 < rows["prefetched"][column] <= rows[TORCHREC][column], rows
    assert rows["prefetched"]["copies to the device"] == BATCH_TENSORS
