"""Cells and tables of a Markdown page of measured differences."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

NONE = "–"


@dataclass(frozen=True)
class Cell:
    """One measured difference, or what there is in its place."""

    value: float | None = None
    limit: float = 0.0
    message: str = NONE
    """What is printed where there is no number."""
    wrong: bool = False
    """Whether what is said should not have happened."""

    @property
    def bad(self) -> bool:
        """Whether the number is over its limit, or no number."""
        return self.wrong or (self.value is not None and not self.value <= self.limit)

    def __str__(self) -> str:
        text = self.message if self.value is None else f"{self.value:.1e}"
        return f"**{text}**" if self.bad else text


def largest(cells: Sequence[Cell]) -> Cell:
    """Return the worst of several cells: what went wrong, then the number nearest to or farthest
    over its limit."""
    wrong = [cell for cell in cells if cell.wrong]
    numbers = [cell for cell in cells if cell.value is not None]
    not_a_number = [cell for cell in numbers if cell.value != cell.value]
    if wrong or not_a_number:
        return (wrong or not_a_number)[0]
    if numbers:
        return max(numbers, key=lambda cell: (cell.bad, cell.value))
    return cells[0] if cells else Cell()


def table(header: Sequence[str], rows: Sequence[Sequence[object]], words: int = 1) -> str:
    """Return a Markdown table; its first columns, as many as `words`, are text, the others are
    numbers."""
    lines = [
        "| " + " | ".join(header) + " |",
        "|" + " --- |" * words + " ---: |" * (len(header) - words),
    ]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def call(kind: type, options: dict[str, object]) -> str:
    """Return a class and its arguments as a user would write them."""
    return f"`{kind.__name__}({', '.join(f'{name}={value}' for name, value in options.items())})`"


def listed(messages: dict[str, str]) -> str:
    """Return the message of each case, two lines each."""
    return "\n".join(
        f"{case}\n    {' '.join(message.split())}" for case, message in messages.items()
    )


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
