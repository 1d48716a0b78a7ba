"""Packages from the index that tests alone use, in folders of their own."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def install(place: Path, packages: Sequence[str], *options: str) -> str:
    """Install packages into a folder, unless it is there; returns why that failed, or "". options:
    of pip."""
    if place.exists():
        return ""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        *options,
        "--target",
        str(place),
        *packages,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return done.stderr[-500:] if done.returncode else ""
