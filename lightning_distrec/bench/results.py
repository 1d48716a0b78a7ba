"""Runs all cases in turns, round after round; prints and draws the results."""

import importlib.util
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as TextTable

from lightning_distrec.bench.runs import BenchOptions, Case, MeasuredRun, run
from lightning_distrec.units import format_bytes, quantity


@dataclass(frozen=True)
class Result:
    """The runs of one strategy on one number of devices."""

    case: Case
    runs: list[MeasuredRun] = field(default_factory=list)

    @property
    def failure(self) -> str:
        """Why the first failed round failed; "" if all rounds were measured."""
        return next((run.failure for run in self.runs if run.failure), "")

    @property
    def step_seconds(self) -> float:
        """Median of the rounds' medians."""
        return statistics.median(run.step_seconds for run in self.runs)

    @property
    def samples_per_second(self) -> float | None:
        """Median of the rounds."""
        numbers = [run.samples_per_second for run in self.runs if run.samples_per_second is not None]
        # Of all rounds or of none, so that it goes with the time, which is over all rounds.
        return statistics.median(numbers) if len(numbers) == len(self.runs) else None

    @property
    def peak_bytes(self) -> int:
        """Peak memory over all ranks and rounds."""
        return max(run.peak_bytes for run in self.runs)


def run_rounds(
    cases: Sequence[Case],
    options: BenchOptions,
    rounds: int,
    log: Callable[[str], None],
    run_case: Callable[..., MeasuredRun] = run,
) -> list[Result]:
    """Run all cases one after the other, `rounds` times: what slows the machine for a while slows all of them.

    A case that fails is not run again. log: gets a line of progress at a time.
    """
    results = [Result(case) for case in cases]
    for number in range(rounds):
        for result in results:
            # It would fail again, perhaps after the whole timeout.
            if result.failure:
                continue
            case = result.case
            log(f"round {number + 1} of {rounds}: {case.strategy} on {case.devices}")
            result.runs.append(run_case(case, options))
            if result.failure:
                log(f"  not measured: {result.failure}")
    return results


def efficiency(result: Result, results: Sequence[Result]) -> float | None:
    """Return samples per second and device, relative to the same strategy on the smallest number of devices."""
    measured = [r for r in results if r.case.strategy == result.case.strategy and not r.failure]
    if result.failure or len(measured) < 2:
        return None
    # It need not be one device, where the module may not fit.
    first = min(measured, key=lambda r: r.case.devices)
    if not first.samples_per_second or not result.samples_per_second:
        return None
    return result.samples_per_second / result.case.devices / (first.samples_per_second / first.case.devices)


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return all results as plain values."""
    return [
        {
            "strategy": result.case.strategy,
            "devices": result.case.devices,
            "failure": result.failure or None,
            **(
                {}
                if result.failure
                else {
                    "step_ms": 1000 * result.step_seconds,
                    "step_ms_by_round": [1000 * run.step_seconds for run in result.runs],
                    "samples_per_second": result.samples_per_second,
                    "peak_bytes": result.peak_bytes,
                    "efficiency": efficiency(result, results),
                }
            ),
        }
        for result in results
    ]


NO_MATPLOTLIB = "results.png was not drawn: matplotlib is not installed. Run pip install matplotlib, then bench again."

FEW_STEPS = 20
"""With fewer, one slow step moves the median."""
MAX_EFFICIENCY = 1.1
"""More than this is a fault of the comparison, not a gain."""


def print_results(results: Sequence[Result], steps: int, console: Console) -> None:
    """Print one row per strategy and number of devices."""
    # A case that has failed has fewer runs than others.
    rounds = max(len(result.runs) for result in results)
    text = TextTable(
        title=f"Medians over {quantity(steps, 'step')} and {quantity(rounds, 'round')}",
        title_justify="left",
        caption="In parentheses: fastest and slowest round. Memory on a CPU is that of the process, with libraries.",
        caption_justify="left",
    )
    for heading in ("strategy", "devices", "step, ms", "samples/s", "efficiency", "peak memory per rank"):
        text.add_column(heading, justify="left" if heading == "strategy" else "right")
    for result in results:
        name, devices = result.case.strategy, str(result.case.devices)
        if result.failure:
            text.add_row(name, devices, "not measured", "", "", "")
            continue
        share = efficiency(result, results)
        times = sorted(1000 * run.step_seconds for run in result.runs)
        extremes = f" ({times[0]:.1f} to {times[-1]:.1f})" if len(times) > 1 else ""
        text.add_row(
            name,
            devices,
            f"{1000 * result.step_seconds:.1f}{extremes}",
            "-" if result.samples_per_second is None else f"{result.samples_per_second:,.0f}",
            "-" if share is None else f"{share:.0%}",
            format_bytes(result.peak_bytes),
        )
    console.print(text)
    for result in results:
        if result.failure:
            console.print(f"{result.case.strategy} on {result.case.devices}: {result.failure}")
    for line in doubts(results, steps):
        console.print(line)


def doubts(results: Sequence[Result], steps: int) -> list[str]:
    """Return why the figures may mislead: too few steps, or an efficiency that no machine has."""
    lines = []
    if steps < FEW_STEPS:
        lines.append(f"A median of {quantity(steps, 'step')} says little: --steps {FEW_STEPS} or more.")
    beyond = [
        f"{result.case.strategy} on {result.case.devices} ({share:.0%})"
        for result in results
        if (share := efficiency(result, results)) is not None and share > MAX_EFFICIENCY
    ]
    if beyond:
        lines.append(
            f"Efficiency above {MAX_EFFICIENCY:.0%}: {', '.join(beyond)}. Something slowed down the run on the fewest "
            "devices, such as another program. Measure again with more --steps and --rounds."
        )
    return lines


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(results: Sequence[Result], file: Path) -> None:
    """Draw samples per second, peak memory and efficiency over devices into a file, one line per strategy."""
    # matplotlib is optional. A Figure without pyplot needs no display, and leaves no figure open.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.6), layout="constrained")
    panels: list[tuple[str, Callable[[Result], Any]]] = [
        ("samples per second", lambda result: result.samples_per_second),
        ("peak memory per rank, MiB", lambda result: result.peak_bytes / 2**20),
        ("efficiency, %", lambda result: None if (e := efficiency(result, results)) is None else 100 * e),
    ]
    for axes, (title, number) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        for strategy in dict.fromkeys(result.case.strategy for result in results):
            points = [
                (result.case.devices, value)
                for result in results
                if result.case.strategy == strategy and not result.failure and (value := number(result)) is not None
            ]
            if points:
                axes.plot(*zip(*sorted(points), strict=True), marker="o", label=strategy)
        axes.set_title(title)
        axes.set_xlabel("devices")
        axes.set_xticks(sorted({result.case.devices for result in results}))
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
    figure.axes[0].legend()
    figure.savefig(file)
