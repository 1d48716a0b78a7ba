"""The tests that need a GPU pass on CUDA devices in host memory, as if a GPU were there."""

import re
import sys

import pytest

from tests.multiprocess.test_gpu_tests import FILES
from tests.support.console import finished
from tests.support.host_cuda.runs import ROOT, variables_or_skip


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_a_file_of_gpu_tests_passes_as_if_a_gpu_were_there(file: str) -> None:
    tests = ["-m", "pytest", f"tests/gpu/{file}", "-q", "-o", "addopts=", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "tests.support.host_cuda", "--devices", "2", *tests]
    variables = variables_or_skip(2) | {"OMP_NUM_THREADS": "1"}
    done = finished(command, ROOT, env=variables)
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE)
    assert "skipped" not in done.stdout
    assert "Hazards between streams: 0\n" in done.stdout
