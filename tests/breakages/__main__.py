"""Breaks the product on purpose, one patch at a time, and tells which test notices.

python -m tests.breakages [--suite short|all] [--list] [NAME ...]

Each patch is applied alone to a copy of the working tree. The tests that should notice run first,
up to the first failure; then, where all of them pass, the rest of the suite. A test that fails
without the patch too does not count.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.breakages.patches import BREAKAGES
from tests.breakages.trial import Outcome, apply, copy_tree, try_tests, undo

SUITES = {"short": "not slow", "all": ""}


def main() -> int:
    """Run the chosen breakages; the exit code is the number that no test notices."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.breakages", description=__doc__.splitlines()[0]
    )
    parser.add_argument("names", nargs="*", help="Run only these.")
    parser.add_argument(
        "--suite", choices=SUITES, default="short", help="Take the tests of `make test` or all."
    )
    parser.add_argument(
        "--only-first", action="store_true", help="Leave out the rest of the suite."
    )
    parser.add_argument(
        "--workers", type=int, default=3, help="Run N tests of the rest of the suite at a time."
    )
    parser.add_argument("--list", action="store_true", help="List the breakages and stop.")
    inputs = parser.parse_args()
    selection = [
        breakage for breakage in BREAKAGES if not inputs.names or breakage.name in inputs.names
    ]
    if unknown := set(inputs.names) - {breakage.name for breakage in selection}:
        parser.error(f"unknown breakages: {', '.join(sorted(unknown))}")
    if inputs.list:
        for breakage in selection:
            print(f"{breakage.name:22} {breakage.suffers}")
        return 0
    survived = 0
    print("| breakage | noticed by | seconds |\n| --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory(prefix="breakages-") as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        for breakage in selection:
            begin = time.monotonic()
            file, initial = apply(breakage, tree)
            try:
                outcome = try_tests(
                    tree, [f"tests/{test}" for test in breakage.tests], SUITES[inputs.suite]
                )
                if outcome.failed is None and not inputs.only_first:
                    outcome = try_tests(
                        tree, ["tests"], SUITES[inputs.suite], workers=inputs.workers
                    )
            finally:
                undo(file, initial, tree)
            text = _in_words(outcome, tree, SUITES[inputs.suite])
            survived += outcome.failed is None
            print(f"| {breakage.name} | {text} | {time.monotonic() - begin:.0f} |", flush=True)
    print(f"\n{len(selection) - survived} of {len(selection)} noticed by the {inputs.suite} suite.")
    return survived


def _in_words(outcome: Outcome, tree: Path, marks: str) -> str:
    if outcome.failed is None:
        return f"nothing: {outcome.passed} tests passed"
    if try_tests(tree, [outcome.failed], marks).failed is not None:
        return f"unclear: {outcome.failed} fails without the patch too"
    return outcome.failed.removeprefix("tests/")


if __name__ == "__main__":
    sys.exit(main())
