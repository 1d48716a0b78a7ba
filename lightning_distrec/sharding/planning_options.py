"""What may be said about planning: how tables find their ranks."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """How it is decided where tables go."""
