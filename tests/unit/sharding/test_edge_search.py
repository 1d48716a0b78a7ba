"""How far a number can go: found by few tries, and told as unfinished where the time is up."""

import time

import pytest

from lightning_distrec.advice.dry_run import FINENESS, EdgeSearch


def _below(limit: int) -> EdgeSearch:
    """Return a search in which numbers up to the limit can be."""
    return EdgeSearch(
        lambda number: "" if number <= limit else f"{number} is too much", {}, 60.0, 0.0
    )


@pytest.mark.parametrize("limit", [1, 511, 512, 700, 99_999])
@pytest.mark.parametrize("start", [1, 512])
def test_the_largest_number_is_found_to_within_a_hundredth(limit: int, start: int) -> None:
    edge = _below(limit).largest(start, 2**20)
    assert edge.possible is not None
    assert edge.impossible is not None
    assert edge.possible <= limit < edge.impossible
    assert edge.impossible - edge.possible <= max(1, edge.possible // FINENESS)
    assert (edge.reason, edge.stopped) == (f"{edge.impossible} is too much", "")
    assert edge.tries <= 30


@pytest.mark.parametrize("limit", [1, 5, 33, 64, 100])
@pytest.mark.parametrize("start", [1, 40])
@pytest.mark.parametrize("least", [1, 30])
def test_the_smallest_number_is_found_exactly(limit: int, start: int, least: int) -> None:
    search = EdgeSearch(
        lambda n: "" if n >= limit else f"{n}",
        {start: "" if start >= limit else f"{start}"},
        60.0,
        0.0,
    )
    edge = search.smallest(least, 100)
    lowest = max(limit, least) if start < limit else min(start, max(limit, least))
    assert edge.possible == lowest
    assert edge.impossible is None or edge.impossible < lowest
    assert edge.tries <= 14


def test_a_search_ends_before_the_try_that_would_be_too_late_and_reports_it() -> None:
    def slow(number: int) -> str:
        time.sleep(0.05)
        return ""

    edge = EdgeSearch(slow, {4: ""}, 0.12, 0.05).largest(4, 2**20)
    assert edge.possible in (8, 16)
    assert edge.impossible is None
    assert edge.stopped == "the next plan would have exceeded 0.12 s"
    skipped = EdgeSearch(slow, {64: ""}, 60.0, 61.0).smallest(1, 100)
    assert (skipped.possible, skipped.tries) == (64, 0)
    assert skipped.stopped == "the next plan would have exceeded 60 s"
