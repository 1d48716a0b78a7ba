"""Runs a script with the device:
`python -m tests.support.host_cuda [--devices N] SCRIPT ARGUMENTS...`.

Or `-m MODULE ARGUMENTS...` in place of a script.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.support.host_cuda.building import SOURCES, library


def environment(devices: int, device_bytes: int = 8 << 30) -> dict[str, str]:
    """Return the variables with which a process, and all that it starts, has the device. Raises
    CannotBuild."""
    path = os.pathsep.join([str(SOURCES / "start"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {
        "HOST_CUDA_LIBRARY": str(library()),
        "HOST_CUDA_DEVICES": str(devices),
        "HOST_CUDA_BYTES": str(device_bytes),
        "PYTHONPATH": path,
    }


def main() -> int:
    """Return the script's exit code, after what the device has seen is printed."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.host_cuda")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, help="a module to run, and its arguments"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help="or a script")
    options = parser.parse_args()
    command = ["-m", *options.module] if options.module else options.script
    with tempfile.TemporaryDirectory() as folder:
        variables = environment(options.devices) | {"HOST_CUDA_REPORTS": folder}
        code = subprocess.call([sys.executable, *command], env=variables)
        _print_reports(Path(folder))
    return code


def _print_reports(folder: Path) -> None:
    counts: Counter[tuple[str, str, str]] = Counter()
    for path in folder.glob("*.json"):
        for kind, text, place, count in json.loads(path.read_text()):
            counts[kind, text, place] += count
    for kind, title in (("hazard", "Hazards between streams"), ("wait", "Waits of the host")):
        rows = [
            (count, text, place)
            for (one_kind, text, place), count in counts.items()
            if one_kind == kind
        ]
        print(f"{title}: {sum(count for count, _, _ in rows)}")
        for count, text, place in sorted(rows, reverse=True)[:20]:
            print(f"  {count} x {text}, at {place}")


if __name__ == "__main__":
    sys.exit(main())
