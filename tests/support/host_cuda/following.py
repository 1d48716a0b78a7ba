"""What a test sees of the CUDA device in host memory: hazards between streams, and where the host
waits for it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

EVENT = "an event"
"""In the place of a stream, where the host waits for what was queued before an event only."""


@dataclass
class Found:
    """What was observed."""

    hazards: list[str] = field(default_factory=list)
    waits: list[tuple[str, str, str]] = field(default_factory=list)
    """Of the host: the stream's name, the operation, and where; and the marks of tests among
    them."""

    def operations(self) -> list[str]:
        """Return for which operations the host has waited."""
        return [operation for _, operation, _ in self.waits]

    def add(self, kind: str, text: str) -> None:
        """Note what the device reports."""
        if kind == "hazard":
            self.hazards.append(f"{text}, at {_place()}")
            return
        operation, _, stream = text.partition(" waits for ")
        if stream != EVENT:
            self.waits.append((stream, operation, _place()))


@contextmanager
def followed_device() -> Iterator[Found]:
    """Inside of the context, what the device reports is noted."""
    import host_cuda_runtime

    found = Found()
    host_cuda_runtime.followers.append(found.add)
    try:
        yield found
    finally:
        host_cuda_runtime.followers.remove(found.add)


def _place() -> str:
    """Return the innermost lines of the package that led here."""
    frame, frames = sys._getframe(2), []
    while frame is not None and len(frames) < 3:
        if "/lightning_distrec/" in frame.f_code.co_filename:
            place = "/".join(frame.f_code.co_filename.split("/")[-2:])
            frames.append(f"{place}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(frames) or "the user's code"
