"""Formats and parses numbers, sizes and bandwidths as people write them, and tables of them."""

import math
import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lightning_distrec.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDE_COLUMNS = 160
PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
BINARY_PREFIXES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
SIZE_UNITS = {
    f"{prefix}B": float(number) for prefix, number in (PREFIXES | BINARY_PREFIXES).items()
} | {"": 1.0}
BANDWIDTH_UNITS = {f"{unit}/s" if unit else "": number for unit, number in SIZE_UNITS.items()}
BANDWIDTH_UNITS |= {f"{prefix}bit/s": number / 8 for prefix, number in PREFIXES.items()}
NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*(\S*)\s*")


def quantity(number: int, noun: str) -> str:
    """Return a number with its noun: "1 rank", "2 ranks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shortened(words: Sequence[str], max_shown: int, separator: str = ", ") -> str:
    """Return up to `max_shown` of the words, and the number of those left out: "a, b and 3
    more"."""
    suffix = f" and {len(words) - max_shown} more" if len(words) > max_shown else ""
    return separator.join(words[:max_shown]) + suffix


def describe_error(error: BaseException) -> str:
    """Return type and message of an error in one line, at most 200 characters of the message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def format_ranks(ranks: Sequence[int]) -> str:
    """Return "0-3" for [0, 1, 2, 3], "0, 2" for [0, 2]."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


def format_bytes(number: float) -> str:
    """Return a number of bytes with its unit: 950 B, 12.3 KiB, 1.2 MiB."""
    number, unit = scaled(number, ["B", "KiB", "MiB", "GiB", "TiB"], 1024, 1023.5)
    return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"


def scaled(
    number: float, units: Sequence[str], factor: int = 1000, limit: float = 999.5
) -> tuple[float, str]:
    """Return a number below `limit` and its unit. units: from small to large, each `factor` times
    the one before."""
    for unit in units[:-1]:
        if number < limit:
            return number, unit
        number /= factor
    return number, units[-1]


def parse_bytes(text: str, setting: str) -> int:
    """Return the bytes of "80GB" (10^9 each), "80GiB" (2^30), "1.5 TB" or a plain number; case does
    not matter.

    setting: the option and its value, with which the error begins. Raises ConfigError: the text is
    not a size above 0.
    """
    number = _parse(text, SIZE_UNITS)
    if number is None:
        raise ConfigError(
            f"{setting}: A size above 0 is needed, such as 80GB, 24GiB or 8000000000."
        )
    return int(number)


def parse_bandwidth(value: str | float, setting: str) -> float:
    """Return the bytes per second of "25GB/s", "200Gbit/s", "1.5 TiB/s" or a plain number.

    setting: the option and its value, with which the error begins.
    Raises ConfigError: the text is not a bandwidth above 0.
    """
    # A small b may be bits or bytes.
    number = None if str(value).endswith("b/s") else _parse(str(value), BANDWIDTH_UNITS)
    if number is None:
        raise ConfigError(
            f"{setting}: A bandwidth above 0 is needed, such as 25GB/s, 200Gbit/s, or a number of "
            "bytes per second."
        )
    return number


def _parse(text: str, units: dict[str, float]) -> float | None:
    """Return a number times its unit; None where the text is no finite number above 0 with one of
    the units."""
    match = NUMBER.fullmatch(text)
    factor = (
        {name.upper(): factor for name, factor in units.items()}.get(match[2].upper())
        if match
        else None
    )
    number = float(match[1]) * factor if match and factor else 0.0
    return number if 0 < number < math.inf else None


def format_bandwidth(bytes_per_second: float) -> str:
    """Return a bandwidth as parse_bandwidth reads it: 950 B/s, 25.0 MB/s, 1.2 TB/s."""
    number, unit = scaled(bytes_per_second, ["B/s", "KB/s", "MB/s", "GB/s", "TB/s"])
    return f"{number:.0f} B/s" if unit == "B/s" else f"{number:.1f} {unit}"


def text_table(headings: Iterable[str], text_headings: Collection[str], **options: Any) -> "Table":
    """Return a table without rows. text_headings: of columns with text, not numbers. options: of
    rich's Table."""
    from rich.table import Table  # a command line that is only checked does not load it

    table = Table(title_justify="left", caption_justify="left", **options)
    for heading in headings:
        table.add_column(
            heading, justify="left" if heading in text_headings else "right", overflow="fold"
        )
    return table


def print_wide(table: "Table", console: "Console | None" = None) -> None:
    """Print a table. Where the output is no terminal rich assumes 80 columns, which would fold most
    of them."""
    from rich.console import Console

    console = console or Console()
    (console if console.is_terminal else Console(width=WIDE_COLUMNS, file=console.file)).print(
        table
    )
