"""Runs all cases in turns, round after round, and collects their results."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_distrec.bench.runs import BenchOptions, Case, MeasuredRun, run


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
