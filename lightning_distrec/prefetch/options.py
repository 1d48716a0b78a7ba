"""The options of prefetching."""

from dataclasses import dataclass

from lightning_distrec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PrefetchOptions:
    """How far batches are prefetched."""

    depth: int = 3
    """Batches in flight on this rank. 1: no prefetching; tables are looked up as they are called. 2: the next batch's
    ids are sent during this step. 3: the batch after it is on the device too, so that ranks have its status before its
    ids are due. Higher values hide a slower loader."""
    computed_ids: bool = True
    """Prefetch also what a step computes from its batch: its operations are recorded in its first steps, and repeated
    ahead for later batches. Off, it is looked up as the step calls."""

    def __post_init__(self) -> None:
        if not isinstance(self.depth, int) or isinstance(self.depth, bool) or self.depth < 1:
            raise ConfigError(f"prefetch: depth={self.depth!r} must be a whole number of batches, at least 1 (off).")
