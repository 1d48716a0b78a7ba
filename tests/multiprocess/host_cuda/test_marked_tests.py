"""Tests that are marked host_cuda run on the CUDA device in host memory, in one process that has it."""

import re
from pathlib import Path

from tests.support.host_cuda.runs import run_on_device

TESTS = Path(__file__).parents[2]


def test_marked_tests_pass_on_the_device_in_host_memory() -> None:
    files = [str(path) for path in sorted(TESTS.rglob("test_*.py")) if "pytest.mark.host_cuda" in path.read_text()]
    output = run_on_device("-m", "pytest", "-q", "-m", "host_cuda", "-p", "no:cacheprovider", *files)
    assert re.search(r"^\d+ passed, \d+ deselected", output, re.MULTILINE), output
