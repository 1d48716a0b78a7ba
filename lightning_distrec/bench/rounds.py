"""Every strategy on every number of devices, in turns, round after round; what came of it."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_distrec.bench.runs import Case, Run, Wanted, run


@dataclass(frozen=True)
class Result:
    """The runs of one strategy on one number of devices."""

    case: Case
    runs: list[Run] = field(default_factory=list)

    @property
    def why_not(self) -> str:
        """Why it could not be measured, of the first round that failed; "" where all did."""
        return next((run.why_not for run in self.runs if run.why_not), "")

    @property
    def step_seconds(self) -> float:
        """The median of the rounds' medians."""
        return statistics.median(run.step_seconds for run in self.runs)

    @property
    def samples_per_second(self) -> float | None:
        """The median of the rounds."""
        numbers = [run.samples_per_second for run in self.runs if run.samples_per_second is not None]
        return statistics.median(numbers) if len(numbers) == len(self.runs) else None

    @property
    def peak_bytes(self) -> int:
        """The most memory of any rank in any round."""
        return max(run.peak_bytes for run in self.runs)


def run_rounds(
    cases: Sequence[Case], wanted: Wanted, rounds: int, tell: Callable[[str], None], once: Callable[..., Run] = run
) -> list[Result]:
    """Run all cases one after the other, `rounds` times, so that what slows the machine for a while slows all of them.

    A case that fails is not run again. tell: told what is under way.
    """
    results = [Result(case) for case in cases]
    for number in range(rounds):
        for result in results:
            if result.why_not:
                continue
            case = result.case
            tell(f"round {number + 1} of {rounds}: {case.strategy} on {case.devices}")
            result.runs.append(once(case, wanted))
            if result.why_not:
                tell(f"  not measured: {result.why_not}")
    return results


def efficiency(result: Result, results: Sequence[Result]) -> float | None:
    """Return samples per second and device, as a share of those of the same strategy on the fewest devices."""
    measured = [r for r in results if r.case.strategy == result.case.strategy and not r.why_not]
    if result.why_not or len(measured) < 2:
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
            "why_not": result.why_not or None,
            **(
                {}
                if result.why_not
                else {
                    "step_ms": 1000 * result.step_seconds,
                    "step_ms_of_rounds": [1000 * run.step_seconds for run in result.runs],
                    "samples_per_second": result.samples_per_second,
                    "peak_bytes": result.peak_bytes,
                    "efficiency": efficiency(result, results),
                }
            ),
        }
        for result in results
    ]
