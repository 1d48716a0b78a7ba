"""Writes the section about checkpoints of docs/performance.md from a run: saving and loading
against bare torch.

    python -m tests.benchmarks.checkpointing [--quick] [--rounds N] [--rows N] [--folder FOLDER]
    [--write]

All of it takes about five minutes on two cores and a disk that do nothing else, and 10 GB of that
disk. It only prints the section, unless --write is given. Exits with 1 where something went wrong;
missed aims stand in bold.
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, here and in the ranks

from tests.benchmarks import checkpointing_text as text  # noqa: E402
from tests.benchmarks.checkpointing_model import QUICK_ROWS, ROWS, tensor_bytes  # noqa: E402
from tests.benchmarks.checkpointing_runs import Measured, measure, seconds_table, summary  # noqa: E402  # noqa: E402
from tests.benchmarks.performance_rows import machine, summary_table  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"


def main() -> int:
    """Measure, print, and write the section; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="two rounds of small tables: to see that it works"
    )
    parser.add_argument("--rounds", type=int, default=4, help="turns of each contender")
    parser.add_argument("--rows", type=int, default=ROWS, help="of each table")
    parser.add_argument("--folder", help="where temporary folders go; its file system is measured")
    parser.add_argument("--write", action="store_true", help=f"put the section into {PAGE.name}")
    options = parser.parse_args()
    rounds, num_rows = (2, QUICK_ROWS) if options.quick else (options.rounds, options.rows)
    began = time.monotonic()
    _tell(
        f"load before: {os.getloadavg()[0]:.1f}; what others do at the same time is measured, too"
    )

    def tell(message: str) -> None:
        _tell(f"{time.monotonic() - began:.0f} s: {message}")

    measured = measure(
        num_rows,
        rounds,
        options.folder,
        lambda message: _tell(f"{time.monotonic() - began:.0f} s: {message}"),
    )
    actual = _section(measured, rounds)
    print(actual)
    if options.write:
        PAGE.write_text(
            text.with_section(PAGE.read_text(encoding="utf-8"), actual), encoding="utf-8"
        )
    for problem in measured.problems:
        _tell(f"went wrong: {problem}")
    missed = sum(row.missed for row in summary(measured))
    _tell(f"{time.monotonic() - began:.0f} s, {missed} aims missed, load {os.getloadavg()[0]:.1f}")
    return int(bool(measured.problems))


def _section(measured: Measured, rounds: int) -> str:
    notes = [f"- Not measured: {name}: {reason}." for name, reason in measured.missing.items()]
    notes += [f"- **Went wrong: {problem.splitlines()[-1]}**" for problem in measured.problems]
    return text.section(
        summary_table(summary(measured)),
        seconds_table(measured),
        notes,
        machine=machine(),
        size=f"{tensor_bytes(measured.num_rows) / 2**30:.2f} GiB",
        file_system=measured.file_system,
        rounds=rounds,
    )


def _tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
