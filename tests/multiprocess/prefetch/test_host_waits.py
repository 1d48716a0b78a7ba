"""Where the host waits for a GPU in a step, counted on CUDA devices in host memory, beside
TorchRec's own pipeline."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.host_cuda.runs import ROOT, variables_or_skip
from tests.support.limits import LIMIT_SECONDS

LIMITS = {"prefetched, logged": 1, "rows sent once": 14}
"""Waits in a step, contender by contender. On the short path there is one, for all numbers of a
batch's ids.

Of the last one, two are for different ids, however many features there are, and one is the model's
own.
"""
BACKWARD = "a thread of the device"
"""What waits in backward, of any model with these tables: FBGEMM."""


@pytest.mark.slow
def test_a_step_waits_no_more_often_than_torchrecs_pipeline(tmp_path: Path) -> None:
    path, environ = tmp_path / "waits.json", variables_or_skip(devices=2)
    command = [sys.executable, "-m", "tests.support.counted_waits", str(path), *LIMITS, "TorchRec"]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(path.read_text())
    forward = {
        name: {place: n for place, n in places.items() if not place.startswith(BACKWARD)}
        for name, places in counts.items()
    }
    total_of_torchrec = sum(forward["TorchRec"].values())
    for name, limit in LIMITS.items():
        # one of a few steps is left out
        waits = {place: int(number) for place, number in forward[name].items()}
        assert 0 < sum(waits.values()) <= limit <= total_of_torchrec, (name, waits)
