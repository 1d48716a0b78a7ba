"""Checks and measures on one GPU, in 25 minutes at most: `make bench-gpu`. Without a GPU it says so
and exits with 0.

    python -m tests.benchmarks.gpu [--only parity speed] [--json found.json] [--device cpu --small]

On a GPU, a run of all parts writes the section about GPUs in docs/performance.md. Elsewhere
`--device cpu --small` runs the same parts, to see that they themselves work; it says nothing about
GPUs and writes no page. Exits with 1 where something differs or fails.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.gpu import parts
from tests.benchmarks.gpu.page import PAGE, section, write_section
from tests.benchmarks.gpu.speed import speed
from tests.benchmarks.report import versions
from tests.support.ranks import run_on_ranks

TESTS = "tests/gpu"
PARTS: dict[str, tuple[Any, int]] = {
    "kernels": (parts.kernels, 90),
    "syncs": (parts.syncs, 90),
    "races": (parts.races, 90),
    "sanitizer": (parts.sanitizer, 90),
    "parity": (parts.parity, 120),
    "checkpoints": (parts.checkpoints, 120),
    "speed": (speed, 540),
}
"""Name -> the function, and its limit in seconds."""
TESTS_SECONDS = 360
NO_DEVICE = (
    "There is no CUDA device on this machine: nothing was checked or measured, and "
    "nothing has passed."
)


def main() -> int:
    """Run the parts, print and write what they found; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small sizes, to see that it works")
    parser.add_argument(
        "--only", nargs="+", choices=(*PARTS, "tests"), help="parts to run; without it, all"
    )
    parser.add_argument(
        "--json", type=Path, help="where the results go; after a run of all parts, beside the page"
    )
    inputs = parser.parse_args()
    if inputs.device == "cuda" and not torch.cuda.is_available():
        print(NO_DEVICE)
        return 0
    os.environ["GPU_TESTS_ON"] = inputs.device  # read by tests/gpu, here and in all processes
    device = torch.cuda.get_device_name() if inputs.device == "cuda" else "this CPU"
    results: dict[str, Any] = {
        "device": device,
        "small": inputs.small,
        "versions": versions(),
        "parts": {},
    }
    is_full = inputs.device == "cuda" and not inputs.only and not inputs.small
    path = inputs.json or (PAGE.with_name("performance_gpu.json") if is_full else None)
    for name in inputs.only or ("tests", *PARTS):
        results["parts"][name] = actual = _run(name, inputs.device, inputs.small)
        print(f"{name}: {json.dumps(actual, indent=1)}", file=sys.stderr, flush=True)
        if path is not None:  # after each part: whoever ends this command keeps those that were run
            path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if is_full:
        write_section(section(results))
    bad = {name: part["failed"] for name, part in results["parts"].items() if part["failed"]}
    print(
        f"On {device}: {len(results['parts']) - len(bad)} of {len(results['parts'])} parts "
        f"passed. {bad or ''}"
    )
    return int(bool(bad))


def _run(name: str, device: str, small: bool) -> dict[str, Any]:
    began, actual, failed = time.monotonic(), parts.Found(), ""
    if name == "tests":
        failed = _tests()
    else:
        function, limit = PARTS[name]
        with tempfile.TemporaryDirectory() as folder:
            printed = Path(folder, "printed")
            call = (parts.in_process, 1, function, device, small, printed)
            try:
                actual = run_on_ranks(*call, timeout_seconds=limit)[0]
                failed = ", ".join(f"over its limit: {name}" for name in actual.wrong)
            # a rank that failed, mostly; the other parts are run all the same
            except Exception as error:
                failed = f"{type(error).__name__}: {error}"[-1500:]
                if printed.exists():
                    failed += f"\nIt printed:\n{printed.read_text(errors='replace')[-1500:]}"
    return {"seconds": time.monotonic() - began, "failed": failed, **asdict(actual)}


def _tests() -> str:
    command = [sys.executable, "-m", "pytest", TESTS, "-q", "-m", "", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TESTS_SECONDS)
    except subprocess.TimeoutExpired as error:
        printed = (error.stdout or b"").decode(errors="replace")[-1500:]
        return f"tests/gpu: not done after {TESTS_SECONDS} s. They printed:\n{printed}"
    return "" if done.returncode == 0 else done.stdout[-1500:]


if __name__ == "__main__":
    sys.exit(main())
