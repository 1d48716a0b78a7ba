"""What `make bench-gpu` does where there is no GPU, and what it writes."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.benchmarks.gpu.__main__ import NO_DEVICE, PARTS, main
from tests.benchmarks.gpu.page import BEGIN, END, PAGE, section, write_section
from tests.benchmarks.gpu.parts import Found

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
        [sys.executable, "-m", "tests.benchmarks.gpu", *arguments],
        capture_output=True,
        text=True,
        timeout=500,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_claims_no_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert main() == 0
    assert capsys.readouterr().out.strip() == NO_DEVICE


def test_the_section_shows_what_is_over_its_limit_and_stays_between_its_markers(
    tmp_path: Path,
) -> None:
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


def fails(device: str, small: bool) -> Found:
    """Print, and fail."""
    print("measured before it failed")
    raise RuntimeError("no such kernel")


def hangs(device: str, small: bool) -> Found:
    """Print, and wait."""
    print("measured before it hung", flush=True)
    time.sleep(600)
    return Found()


def passes(device: str, small: bool) -> Found:
    """Measure."""
    return Found(numbers={"steps": 1.0})


@pytest.mark.slow
def test_a_part_that_fails_or_hangs_keeps_what_it_printed_and_the_others_are_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for part, limit in ((fails, 60), (hangs, 15), (passes, 60)):
        monkeypatch.setitem(PARTS, part.__name__, (part, limit))
    path = tmp_path / "measured.json"
    arguments = ["--device", "cpu", "--only", "fails", "hangs", "passes", "--json", str(path)]
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    monkeypatch.setenv("GPU_TESTS_ON", "cpu")
    assert main() == 1
    actual = json.loads(path.read_text())["parts"]
    assert "RuntimeError: no such kernel" in actual["fails"]["failed"]
    assert actual["fails"]["failed"].endswith("It printed:\nmeasured before it failed\n")
    assert "rank 0 was not done after 15 s" in actual["hangs"]["failed"]
    assert "in hangs" in actual["hangs"]["failed"], "its stack"
    assert "It printed:\nmeasured before it hung" in actual["hangs"]["failed"]
    assert (actual["passes"]["failed"], actual["passes"]["numbers"]) == ("", {"steps": 1.0})
    assert "On this CPU: 1 of 3 parts passed." in capsys.readouterr().out


@pytest.mark.slow
def test_all_parts_but_the_tests_run_on_a_cpu(tmp_path: Path) -> None:
    done = command(
        "--device", "cpu", "--small", "--json", str(tmp_path / "found.json"), "--only", *PARTS
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    actual = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert actual.keys() == PARTS.keys()
    assert actual["speed"]["numbers"]
    assert actual["parity"]["differences"]
    assert f"On this CPU: {len(PARTS)} of {len(PARTS)} parts passed." in done.stdout
