"""Tests that are marked host_cuda run on the CUDA device in host memory, in one process that has
it."""

import re
import sys
from pathlib import Path

from tests.support.console import finished
from tests.support.host_cuda.runs import ROOT, variables_or_skip

MARK = "pytest.mark." + "host_cuda"


def test_marked_tests_pass_on_the_device_in_host_memory() -> None:
    files = [
        str(path)
        for path in sorted(Path(ROOT, "tests").rglob("test_*.py"))
        if MARK in path.read_text()
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "host_cuda",
        "-p",
        "no:cacheprovider",
        *files,
    ]
    environ = variables_or_skip(devices=1)
    done = finished(command, ROOT, env=environ)
    assert re.search(r"^\d+ passed, \d+ deselected", done.stdout, re.MULTILINE), (
        done.stdout + done.stderr
    )
