"""Reads traces in Chrome's trace event format."""

from typing import Any

Event = dict[str, Any]
ROUNDING = 1e-3
"""Microseconds."""


def check_tracks(events: list[Event]) -> None:
    """Check that two events of one track lie side by side or one inside the other, and that only computing nests."""
    complete = [event for event in events if event["ph"] == "X"]
    assert all(event["dur"] >= 0 for event in complete)
    for i, one in enumerate(complete):
        for other in complete[:i]:
            if (one["pid"], one["tid"]) != (other["pid"], other["tid"]):
                continue
            first, second = sorted((one, other), key=lambda event: (event["ts"], -event["dur"]))
            end = first["ts"] + first["dur"]
            follows = second["ts"] >= end - ROUNDING
            is_inside = second["ts"] + second["dur"] <= end + ROUNDING and one["cat"] == "compute and wait"
            assert follows or is_inside, (first, second)


def steps_in(events: list[Event]) -> dict[int, list[str]]:
    """Return rank -> the names of its steps."""
    found: dict[int, list[str]] = {}
    for event in events:
        if event.get("cat") == "steps":
            found.setdefault(event["pid"], []).append(event["name"])
    return found


def spans_in(events: list[Event]) -> dict[int, list[tuple[str, float]]]:
    """Return rank -> names and durations in microseconds of its spans, in the order of their ends."""
    found: dict[int, list[tuple[float, float, str, float]]] = {}
    for event in events:
        if event["ph"] == "X" and event["cat"] != "steps":
            end = event["ts"] + event["dur"]
            found.setdefault(event["pid"], []).append((end, -event["ts"], event["name"], event["dur"]))
    return {rank: [(name, duration) for *_, name, duration in sorted(spans)] for rank, spans in found.items()}
