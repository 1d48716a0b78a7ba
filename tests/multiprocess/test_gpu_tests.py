"""The tests that need a GPU are right on this CPU: what they compare, and that their models
train."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.gpu.smoke import PARTS
from tests.support.console import finished
from tests.support.host_cuda.runs import variables_or_skip
from tests.support.ranks import CallsOnRanks, RankFailed

ROOT = Path(__file__).parents[2]
FILES = (
    "test_kernels_and_metrics.py",
    "test_pipelines.py",
    "test_prefetching.py",
    "test_shared_gpu.py",
    "test_sparse_updates.py",
)


ONLY_FOR_TESTS = (
    "hypothesis",
    "iopath",
    "moto",
    "pandas",
    "pytest_instafail",
    "pytest_timeout",
    "xdist",
)


def _hide(folder: Path, *packages: str) -> None:
    for name in packages:
        (folder / f"{name}.py").write_text("raise ImportError")


@pytest.mark.slow
def test_they_need_no_plugins_of_pytest(tmp_path: Path) -> None:
    """As `python -m tests.gpu` runs them, which a machine without a network can."""
    _hide(tmp_path, *ONLY_FOR_TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/gpu",
        "-q",
        "-o",
        "addopts=",
        "--collect-only",
    ]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = finished(command, ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def _fails() -> None:
    raise ValueError("one case")


def test_a_case_that_fails_leaves_the_others_alone() -> None:
    results = CallsOnRanks({"bad": (_fails,), "good": (int, "7")}, 1)
    for _ in range(2):
        with pytest.raises(RankFailed, match="one case"):
            results["bad"]
    assert results["good"] == [7]


@pytest.mark.slow
def test_what_a_gpu_is_checked_with_first_passes_on_a_device_in_host_memory(tmp_path: Path) -> None:
    _hide(tmp_path, "pytest", *ONLY_FOR_TESTS)
    variables = variables_or_skip(devices=1)
    variables["PYTHONPATH"] += os.pathsep + str(tmp_path)
    command = [
        sys.executable,
        "-m",
        "tests.gpu.smoke",
        "--small",
        "--json",
        str(tmp_path / "smoke.json"),
    ]
    done = finished(command, ROOT, env=variables)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    actual = json.loads((tmp_path / "smoke.json").read_text())["parts"]
    assert actual.keys() == PARTS.keys()
    # One line a part, and one about all.
    assert len(done.stdout.splitlines()) == len(PARTS) + 1
    waits_of_ours, waits_of_torchrecs = actual["waits"]["differences"][
        "in a step, against TorchRec's"
    ]
    assert 0 < waits_of_ours <= waits_of_torchrecs
