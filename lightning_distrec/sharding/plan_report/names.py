"""Names of tables in a narrow column: shortened at the left, where they differ least, and never to the same text."""

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.text import Text

NARROWEST = 9


class TableName:
    """One name in a column of a rich table.

    narrowest: the number of letters below which names are not shortened, but continue on another line; see
    `narrowest_width`.
    """

    def __init__(self, name: str, narrowest: int) -> None:
        self.name, self.narrowest = name, narrowest

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the least and the largest width."""
        return Measurement(min(self.narrowest, len(self.name)), len(self.name)).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Return the name in the width that there is."""
        width = options.max_width
        name = self.name if len(self.name) <= width or width < self.narrowest else shortened(self.name, width)
        yield Text(name, overflow="fold")


def shortened(name: str, width: int) -> str:
    """Return the end of `name` in `width` letters."""
    return name if len(name) <= width else f"…{name[1 - width :]}"


def narrowest_width(names: Iterable[str]) -> int:
    """Return the least width, from NARROWEST on, in which no two names are shortened to the same text."""
    names = set(names)
    width = NARROWEST
    while len({shortened(name, width) for name in names}) < len(names):
        width += 1
    return width
