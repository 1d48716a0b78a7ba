"""How every benchmark is started, and what it prints and writes: tables in Markdown, with aims and
spread."""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

NONE = "–"
RESULTS = Path(__file__).with_name("results")


class CannotMeasure(RuntimeError):
    """What is asked for cannot be had on this machine; the message says why."""


@dataclass(frozen=True)
class Row:
    """One measured value, beside its aim."""

    name: str
    value: float | None = None
    """None: not measured."""
    aim: float | None = None
    at_least: bool = False
    """Whether more is better."""
    rounds: Sequence[float] = ()
    """The value in single rounds."""

    @property
    def missed(self) -> bool:
        """Whether the aim was missed."""
        if self.value is None or self.aim is None:
            return False
        reached = self.value >= self.aim if self.at_least else self.value <= self.aim
        return not reached

    def cells(self) -> list[str]:
        """Return what stands in the columns of `rows_table`."""
        value, aim, spread = NONE, NONE, NONE
        if self.value is not None:
            value = format_number(self.value)
        if self.missed:
            value = f"**{value}**"
        if self.aim is not None:
            aim = f"at {'least' if self.at_least else 'most'} {format_number(self.aim)}"
        if len(self.rounds) > 1:
            spread = format_spread(self.rounds)
        return [self.name, value, aim, spread]


def format_number(value: float) -> str:
    """Return three decimals of a ratio, one of what is larger."""
    return f"{value:.1f}" if value >= 10 else f"{value:.3f}"


def format_spread(values: Sequence[float]) -> str:
    """Return the smallest and the largest value."""
    return f"{format_number(min(values))} to {format_number(max(values))}"


def ratio_row(
    name: str, above: Sequence[float], below: Sequence[float], aim: float | None = None
) -> Row:
    """Return the median of the rounds' ratios, at most `aim`; without a value where a contender
    has no rounds."""
    ratios = [first / other for first, other in zip(above, below, strict=False)]
    if not ratios:
        return Row(name, aim=aim)
    return Row(name, statistics.median(ratios), aim, rounds=ratios)


def table(header: Sequence[str], rows: Sequence[Sequence[object]], words: int = 1) -> str:
    """Return a Markdown table; its first columns, as many as `words`, are text, the others are
    numbers."""
    lines = [
        "| " + " | ".join(header) + " |",
        "|" + " --- |" * words + " ---: |" * (len(header) - words),
    ]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def rows_table(rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table."""
    return table(["", "measured", "aim", "in single rounds"], [row.cells() for row in rows])


def versions() -> str:
    """Return what is installed, as one line."""
    names = ("torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "lightning")
    installed = {name: _version(name) for name in names}
    return ", ".join(f"{name} {version}" for name, version in installed.items() if version)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def machine() -> str:
    """Return what this machine is."""
    models = _values_in("/proc/cpuinfo", "model name")
    total = int(_values_in("/proc/meminfo", "MemTotal")[0].split()[0]) / 2**20
    model = models[0] if models else "unknown"
    return f"{os.cpu_count()} cores ({model}), {total:.0f} GiB of memory"


def _values_in(path: str, name: str) -> list[str]:
    lines = Path(path).read_text().splitlines()
    return [line.partition(":")[2].strip() for line in lines if line.startswith(name)]


@dataclass
class Report:
    """One run of a benchmark: its options, and what it has measured so far."""

    options: argparse.Namespace
    name: str
    sections: list[str] = field(default_factory=list)
    """Tables, in Markdown."""
    problems: list[str] = field(default_factory=list)
    """What should not have happened, and what could not be measured."""
    rows: list[Row] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    load: float = field(default_factory=lambda: os.getloadavg()[0])
    failed: bool = False

    def log(self, message: str) -> None:
        """Print what is done so far."""
        seconds = time.monotonic() - self.began
        print(f"{seconds:.0f} s: {message}", file=sys.stderr, flush=True)

    def attempt(self, part: str, action: Any, *args: Any, **options: Any) -> Any:
        """Return what an action returns; None where it fails, which the report says."""
        try:
            result = action(*args, **options)
        except CannotMeasure as error:
            self.problems.append(f"Not measured: {part}: {error}.")
            return None
        except (AssertionError, RuntimeError) as error:
            self.log(f"{part} went wrong: {error}")
            self.note(f"{part}: {str(error).splitlines()[-1]}")
            return None
        self.log(f"{part} is done")
        return result

    def note(self, problem: str) -> None:
        """Keep what should not have happened."""
        self.failed = True
        self.problems.append(f"**Went wrong: {problem}**")

    def finish(self) -> int:
        """Print the report, and write it where asked; returns the exit status."""
        text = self.text()
        print(text)
        if self.options.write:
            path = RESULTS / f"{self.name}.md"
            path.write_text(f"{text}\n", encoding="utf-8")
        missed = sum(row.missed for row in self.rows)
        self.log(f"{missed} aims missed, load {os.getloadavg()[0]:.1f}")
        return int(self.failed)

    def text(self) -> str:
        """Return the report in Markdown. A missed aim is bold."""
        arguments = " ".join(sys.argv[1:])
        head = f"`python -m tests.benchmarks.{self.name} {arguments}`".replace(" `", "`")
        head += f" measured this on {date.today()}, at a load of {self.load:.1f}.\n"
        head += f"Machine: {machine()}. Versions: {versions()}."
        parts = [f"# {self.name}", head]
        if self.rows:
            parts.append(rows_table(self.rows))
        if self.problems:
            parts.append("\n".join(f"- {problem}" for problem in self.problems))
        return "\n\n".join([*parts, *self.sections])


def start(name: str, document: str | None, **arguments: dict[str, Any]) -> Report:
    """Return the report of a benchmark whose command line has these options, and `--quick` and
    `--write`.

    Processes that are started from here on have one thread each.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(
        description=document, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: to see that it works")
    parser.add_argument("--write", action="store_true", help=f"write results/{name}.md")
    for argument, options in arguments.items():
        parser.add_argument(f"--{argument.replace('_', '-')}", **options)
    return Report(parser.parse_args(), name)
