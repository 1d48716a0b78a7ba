"""The console script, as a user runs it."""

import subprocess
import sys
from pathlib import Path

from tests.support.environments import environment
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).resolve().parents[2]


def fit_by_console(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `lightning-distrec fit` in the repository's root, which must succeed; returns what it
    printed."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lightning-distrec"), "fit", *arguments],
        cwd=ROOT,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done
