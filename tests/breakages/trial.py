"""A copy of the working tree, patched or not, and its tests."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.breakages.patches import Breakage

ROOT = Path(__file__).resolve().parents[2]
TEST_SECONDS = 150
"""A test that takes longer hangs; it counts as failed."""


@dataclass(frozen=True)
class Outcome:
    """What a run of tests came to. failed: the first that did; None: all passed."""

    failed: str | None
    passed: int = 0


def copy_tree(target: Path) -> None:
    """Copy what git knows of the working tree, and what it does not ignore; link what tests
    download."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    for name in ("data", ".venv"):
        if (ROOT / name).exists():
            (target / name).unlink(missing_ok=True)
            (target / name).symlink_to((ROOT / name).resolve())


def place_of(breakage: Breakage, root: Path) -> tuple[Path, str, str]:
    """Return the file that a breakage changes, its text now, and its text then.

    Raises ValueError: what it looks for is not there exactly once, or it changes nothing.
    """
    room = root / breakage.room
    files = [room] if room.is_file() else sorted(room.rglob("*.py"))
    # Wherever the formatter may have broken the line.
    find = breakage.find.replace(" ", r"\s+").replace(r"\(", r"\(\s*").replace(r"\)", r",?\s*\)")
    actual = [(file, file.read_text()) for file in files]
    actual = [(file, text) for file, text in actual if re.search(find, text)]
    count = sum(len(re.findall(find, text)) for _, text in actual)
    if count != 1:
        raise ValueError(
            f"{breakage.name}: {breakage.find!r} matches {count} times in {breakage.room} "
            f"({len(files)} files)"
        )
    file, text = actual[0]
    broken = re.sub(find, breakage.replace, text)
    if broken == text:
        raise ValueError(f"{breakage.name} changes nothing")
    compile(broken, str(file), "exec")
    return file, text, broken


def apply(breakage: Breakage, root: Path) -> tuple[Path, str]:
    """Patch the file in place, and return it with its text before."""
    file, initial, final = place_of(breakage, root)
    file.write_text(final)
    return file, initial


def undo(file: Path, initial: str, root: Path) -> None:
    """Put the file's text back, and end what the broken product has left running."""
    file.write_text(initial)
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(root).encode() in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def try_tests(tree: Path, tests: list[str], marks: str, workers: int = 0) -> Outcome:
    """Run tests up to the first failure. tests: files, folders or single tests. workers: 0 runs
    them in one process."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-rfE",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        "-m",
        marks,
    ]
    command += [f"--timeout={TEST_SECONDS}", f"--numprocesses={workers}", *tests]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    failed = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", done.stdout, flags=re.MULTILINE)
    passed = re.search(r"(\d+) passed", done.stdout)
    if failed is None and done.returncode not in (0, 5):
        raise RuntimeError(
            f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return Outcome(failed[1] if failed else None, int(passed[1]) if passed else 0)
