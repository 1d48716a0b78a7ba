"""Runs Lightning's own tests with one of our strategies in place of its own, and prints what fails
only then.

    python -m tests.lightning_own.compare CHECKOUT [--strategy ddp_tuned] [--only loops trainer]
    [--skip-control]

CHECKOUT: a folder with `tests/tests_pytorch` and `pyproject.toml` of the installed Lightning's
version. The control is Lightning's DDPStrategy, put in place in the same way: a test counts only if
that passes. Packages that the tests need (tensorboard, scikit-learn with narwhals, psutil) may be
on PYTHONPATH. docs/how_to/ddp_tuned.md says why some differ.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[2]
CONTROL = "ddp"
FOLDERS = (
    "loops", "checkpointing", "callbacks", "models", "trainer", "core", "loggers", "utilities", "strategies",
    "plugins", "profilers", "overrides",
)  # fmt: skip
NO_OPTIONS_OF_THEIRS = ("-o", "addopts=--strict-markers --disable-pytest-warnings")


@dataclass
class Outcome:
    """What became of one test, over its phases."""

    outcome: str = "passed"
    reason: str = ""
    made: int = 0
    """How many Trainers had the strategy put in place."""


def run(checkout: Path, strategy: str, folder: str, results: Path, seconds: int) -> None:
    """Run the tests of one folder, in a copy of the checkout: they look for files that other runs
    leave there."""
    copy = results / strategy / folder
    for tests_values in ("tests_pytorch", "legacy"):
        shutil.copytree(checkout / "tests" / tests_values, copy / "tests" / tests_values)
    shutil.copy(checkout / "pyproject.toml", copy)
    environment = os.environ | {
        "LIGHTNING_OWN_STRATEGY": strategy,
        "LIGHTNING_OWN_RESULTS": str(results / f"{strategy}.jsonl"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH")))),
        "OMP_NUM_THREADS": "1",
    }
    options = [
        "-p",
        "tests.lightning_own.plugin",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:rerunfailures",
    ]
    options += [
        "--continue-on-collection-errors",
        "--timeout",
        "60",
        "--tb=short",
        *NO_OPTIONS_OF_THEIRS,
    ]
    command = [sys.executable, "-m", "pytest", "-q", *options]
    with (results / f"{strategy}-{folder}.log").open("w") as log:
        subprocess.run(
            [*command, f"tests_pytorch/{folder}"], cwd=copy / "tests", env=environment, stdout=log, stderr=log,
            stdin=subprocess.DEVNULL, timeout=seconds, check=False,
        )  # fmt: skip


def read(path: Path) -> dict[str, Outcome]:
    """Return the outcome of each test: failed if one of its phases is."""
    outcomes: dict[str, Outcome] = {}
    for line in path.read_text().splitlines():
        phase = json.loads(line)
        test = outcomes.setdefault(phase["test"], Outcome())
        test.made = max(test.made, phase["made"])
        if phase["outcome"] != "passed" and test.outcome != "failed":
            test.outcome, test.reason = phase["outcome"], phase["reason"]
    return outcomes


def table(strategy: str, control: dict[str, Outcome], distrec: dict[str, Outcome]) -> str:
    """Return counts of both runs and a line for each test that only ours fails, or does not end."""
    lines = []
    for name, entry in ((CONTROL, control), (strategy, distrec)):
        counts = Counter(test.outcome for test in entry.values())
        made = [test for test in entry.values() if test.made and test.outcome != "skipped"]
        passed = sum(test.outcome == "passed" for test in made)
        lines.append(
            f"{name}: {len(entry)} tests, {counts['passed']} passed, {counts['failed']} failed, "
            f"{counts['skipped']} "
            f"skipped; {len(made)} made the strategy, {passed} of them passed"
        )
    missing = Outcome("failed", "did not run: its process ended")
    passes = {name for name, test in control.items() if test.outcome == "passed"}
    only_ours = {
        name: test
        for name in sorted(passes)
        if (test := distrec.get(name, missing)).outcome != "passed"
    }
    lines += ["", f"pass with {CONTROL} and not with {strategy}: {len(only_ours)}"]
    lines += [f"  {name}\n    {test.reason}" for name, test in only_ours.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--strategy", default="ddp_tuned")
    parser.add_argument(
        "--only", nargs="+", default=FOLDERS, metavar="FOLDER", help="in tests_pytorch"
    )
    parser.add_argument("--jobs", type=int, default=2, help="folders at once")
    parser.add_argument(
        "--seconds", type=int, default=3600, help="the longest that a folder may take"
    )
    parser.add_argument("--results", type=Path, default=Path("lightning_own_results"))
    parser.add_argument(
        "--skip-control", action="store_true", help="compare with the control of an earlier run"
    )
    inputs = parser.parse_args(arguments)
    results, strategies = inputs.results.absolute(), [inputs.strategy]
    if not inputs.skip_control:
        strategies.insert(0, CONTROL)
    for strategy in strategies:
        shutil.rmtree(results / strategy, ignore_errors=True)
        (results / f"{strategy}.jsonl").unlink(missing_ok=True)
    results.mkdir(exist_ok=True)
    with ThreadPoolExecutor(inputs.jobs) as pool:
        runs = [
            pool.submit(run, inputs.checkout.absolute(), strategy, folder, results, inputs.seconds)
            for folder in inputs.only
            for strategy in strategies
        ]
    for done in runs:
        done.result()
    print(
        table(
            inputs.strategy,
            *(read(results / f"{strategy}.jsonl") for strategy in (CONTROL, inputs.strategy)),
        )
    )


if __name__ == "__main__":
    main()
