"""What `make bench-gpu` does where there is no GPU, and what it writes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.benchmarks.gpu.__main__ import NO_DEVICE, PARTS, main
from tests.benchmarks.gpu.page import BEGIN, END, PAGE, section, write_section

RESULTS = {
    "device": "a GPU",
    "versions": "torch 2",
    "parts": {
        "parity": {
            "seconds": 3.0,
            "failed": "over its limit: Adam",
            "differences": {"Adam": [0.5, 1e-5]},
            "numbers": {"examples per second": 123456.0, "idle share": 0.25},
            "notes": ["A note."],
        }
    },
}


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.gpu", *arguments], capture_output=True, text=True, timeout=500
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_claims_no_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert main() == 0
    assert capsys.readouterr().out.strip() == NO_DEVICE


def test_the_section_shows_what_is_over_its_limit_and_stays_between_its_markers(tmp_path: Path) -> None:
    text = section(RESULTS)
    assert "**parity** (3 s): over its limit: Adam" in text
    assert "| Adam | 5.0e-01 | 1e-05 |" in text
    assert "| examples per second | 123,456 |" in text
    assert "| idle share | 0.25 |" in text
    page = tmp_path / "page.md"
    initial = PAGE.read_text()
    page.write_text(initial)
    write_section(text, page)
    write_section("Not run yet.", page)
    assert page.read_text() == initial, "markers and all else stay"
    assert BEGIN in initial
    assert END in initial


@pytest.mark.slow
def test_all_parts_but_the_tests_run_on_a_cpu(tmp_path: Path) -> None:
    done = command("--device", "cpu", "--small", "--json", str(tmp_path / "found.json"), "--only", *PARTS)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    actual = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert actual.keys() == PARTS.keys()
    assert actual["speed"]["numbers"]
    assert actual["parity"]["differences"]
    assert f"On this CPU: {len(PARTS)} of {len(PARTS)} parts passed." in done.stdout
