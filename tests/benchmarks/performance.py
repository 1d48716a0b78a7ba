"""Writes docs/performance.md from a run: step times of Trainer.fit against a loop written by hand
with torchrec.

    python -m tests.benchmarks.performance [--only bare delay] [--quick] [--out docs/performance.md]

All of it takes about ten minutes on two cores that do nothing else. A run of parts, or a quick one,
only prints what it found, unless --out is given. Exits with 1 where something went wrong, losses
that differ for example; missed aims stand in bold.
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded, here and in the ranks

from tests.benchmarks import performance_text as text  # noqa: E402
from tests.benchmarks.performance_rows import (  # noqa: E402
    links_table,
    losses_said,
    machine,
    steps_table,
    summary,
    summary_table,
)
from tests.benchmarks.performance_runs import Measured, best_of_ours, measure  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"
GPU = "## On a GPU"
PARTS = ("bare", "logged", "delay", "link", "ddp", "memory")


def main() -> int:
    """Measure, print, and write the page; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, help="parts to run; without it, all")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contender")
    parser.add_argument(
        "--quick", action="store_true", help="two rounds, no large tables: to see that it works"
    )
    parser.add_argument("--out", type=Path, help="where the page goes")
    parser.add_argument(
        "--profiles",
        default="",
        metavar="FOLDER",
        help="write a cProfile of one turn of each there",
    )
    options = parser.parse_args()
    rounds = 2 if options.quick else options.rounds
    began = time.monotonic()
    _tell(
        f"load before: {os.getloadavg()[0]:.1f}; what others do at the same time is measured, too"
    )
    measured = measure(options.only or PARTS, rounds, not options.quick, _tell, options.profiles)
    rows = summary(measured)
    for row in rows:
        if row.value is not None:
            _tell(" | ".join(row.cells()))
    out = options.out or (None if options.only or options.quick else PAGE)
    if out is not None:
        out.write_text(_with_sections(_page(measured, rounds), out), encoding="utf-8")
    for name, reason in measured.missing.items():
        _tell(f"not measured: {name}: {reason}")
    for problem in measured.problems:
        _tell(f"went wrong: {problem}")
    missed = sum(row.missed for row in rows)
    _tell(f"{out or 'no page'}: {time.monotonic() - began:.0f} s, {missed} aims missed")
    return int(bool(measured.problems))


def _page(measured: Measured, rounds: int) -> str:
    columns = {"here": measured.local, "late": measured.delayed}
    columns |= {f"{rate} Mbit/s": link.times for rate, link in measured.links.items()}
    against = {f"{rows:,} rows": times for rows, times in measured.against_ddp.items()}
    parts = [
        text.head(machine()),
        summary_table(summary(measured)),
        *_notes(measured),
        text.method(rounds),
        text.STEPS,
        steps_table(columns),
        text.DELAY,
        text.LINK,
        links_table(measured),
        text.LOSSES,
        losses_said(measured),
        text.TIME,
        text.WHERE_THE_TIME_GOES or text.NOTHING_YET,
        text.ddp(steps_table(against, [best_of_ours(), "DDP"])),
        text.MEMORY,
        text.GPU,
    ]
    return "\n\n".join(parts) + "\n"


def _with_sections(page: str, initial: Path) -> str:
    """Return the page with the sections of other benchmarks that were in it before."""
    old = initial.read_text(encoding="utf-8") if initial.exists() else ""
    for name in (
        "checkpointing",
        "dense",
        "plans",
        "planning",
        "estimated steps",
        "host time",
        "by hand",
    ):
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        if begin in old:
            section = old[old.index(begin) : old.index(end) + len(end)]
            page = page.replace(GPU, f"{section}\n\n{GPU}")
    if GPU in old:  # by hand, and by `make bench-gpu`
        page = page[: page.index(GPU)] + old[old.index(GPU) :]
    return page


def _notes(measured: Measured) -> list[str]:
    lines = [f"- Not measured: {name}: {reason}." for name, reason in measured.missing.items()]
    lines += [f"- **Went wrong: {problem.splitlines()[0]}**" for problem in measured.problems]
    return ["\n".join(lines)] if lines else []


def _tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
