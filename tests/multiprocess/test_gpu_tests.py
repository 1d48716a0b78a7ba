"""The tests that need a GPU are right on this CPU: what they compare, and that their models train."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).parents[2]
FILES = ("test_kernels_and_metrics.py", "test_prefetching.py", "test_shared_gpu.py", "test_sparse_updates.py")


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_a_file_of_gpu_tests_passes_on_the_cpu(file: str) -> None:
    command = [sys.executable, "-m", "pytest", f"tests/gpu/{file}", "-q", "-m", "", "-p", "no:cacheprovider"]
    environment = os.environ | {"GPU_TESTS_ON": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout
