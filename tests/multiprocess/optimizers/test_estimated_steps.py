"""Real fits take their places in the order of their estimated times: fused, sparse and dense
updates."""

import os

import pytest

from tests.benchmarks.performance_contenders import Turn
from tests.benchmarks.step_times import FITS, Timed, correlation, section, timed
from tests.support.ranks import run_on_warm_ranks

ORDERED = [FITS[7], FITS[0], FITS[5]]
"""Each differs from the others by more than a factor of two, so that other load on the machine
changes no order."""


def fit_all(folder: str) -> list[Timed]:
    os.environ["XDG_CACHE_HOME"] = folder
    actual = [(fit, *timed(fit, Turn(first=2, counted=4, last=1))) for fit in ORDERED]
    return [Timed(fit, estimate, [steps]) for fit, estimate, steps in actual]


@pytest.mark.slow
def test_measured_steps_are_in_the_order_of_their_estimates(tmp_path) -> None:
    actual: list[Timed] = run_on_warm_ranks(fit_all, 2, str(tmp_path))[0]
    ordered = sorted(actual, key=lambda entry: entry.estimate)
    assert ordered == sorted(actual, key=lambda entry: entry.milliseconds)
    assert [entry.fit.update for entry in ordered] == ["fused", "sparse", "dense"]
    assert correlation(actual) > 0.8
    text = section(actual, "now")
    assert text.count("\n| fused | SGD | table_wise | 256 |") == 1
