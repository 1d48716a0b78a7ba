"""Programs as a user starts them, and the console script."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.environments import environment
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).resolve().parents[2]


def finished(
    command: str | Sequence[str | Path], folder: Path | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Return how a program ended, and what it printed. It is started as by a user, and has a limit.

    folder: in which it runs, that of the tests unless given. options: others of subprocess.run.
    """
    settings = {"env": environment(), "timeout": LIMIT_SECONDS} | options
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=False, **settings
    )


def fit_by_console(*arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `lightning-distrec fit` in a folder, the repository's root unless given, which must
    succeed; returns what it printed."""
    program = Path(sys.executable).parent / "lightning-distrec"
    variables = environment(OMP_NUM_THREADS="1")
    done = finished([program, "fit", *arguments], folder, env=variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return done
