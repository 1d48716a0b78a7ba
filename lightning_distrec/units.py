"""Formats and parses numbers, sizes and bandwidths as people write them."""

import math
import re
from collections.abc import Sequence

from lightning_distrec.errors import ConfigError, did_you_mean

PREFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
BINARY_PREFIXES = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
SIZE_UNITS = {f"{prefix}B": float(number) for prefix, number in (PREFIXES | BINARY_PREFIXES).items()}
BANDWIDTH_UNITS = {f"{unit}/s": number for unit, number in SIZE_UNITS.items()}
BANDWIDTH_UNITS |= {f"{prefix}bit/s": number / 8 for prefix, number in PREFIXES.items()}
NUMBER = re.compile(r"\s*(\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)\s*(\S*)\s*")


def quantity(number: int, noun: str) -> str:
    """Return a number with its noun: "1 rank", "2 ranks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shortened(words: Sequence[str], max_shown: int) -> str:
    """Return up to `max_shown` of the words, and the number of those left out: "a, b and 3 more"."""
    suffix = f" and {len(words) - max_shown} more" if len(words) > max_shown else ""
    return ", ".join(words[:max_shown]) + suffix


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
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1023.5 and len(units) > 1:
        number /= 1024
        units.pop(0)
    return f"{number:.0f} B" if units[0] == "B" else f"{number:.1f} {units[0]}"


def parse_bytes(text: str, setting: str) -> int:
    """Return the bytes of "80GB" (10^9 each), "80GiB" (2^30), "1.5 TB" or a plain number; case does not matter.

    setting: the option and its value, with which the error begins. Raises ConfigError: the text is not a size above 0.
    """
    match = NUMBER.fullmatch(text)
    units = {unit.upper(): number for unit, number in SIZE_UNITS.items()} | {"": 1.0}
    expected = "A size above 0 is needed, such as 80GB, 24GiB or 8000000000."
    if match is None or not float(match[1]) > 0:
        raise ConfigError(f"{setting}: {expected}")
    if match[2].upper() not in units:
        raise ConfigError(f"{setting}: the unit {match[2]!r} is not known{_near(match[2], SIZE_UNITS)} {expected}")
    return int(float(match[1]) * units[match[2].upper()])


def parse_bandwidth(value: str | float, setting: str) -> float:
    """Return the bytes per second of "25GB/s", "200Gbit/s", "1.5 TiB/s" or a plain number.

    setting: the option and its value, with which the error begins.
    Raises ConfigError: the text is not a bandwidth above 0.
    """
    expected = "A bandwidth above 0 is needed, such as 25GB/s, 200Gbit/s, or a number of bytes per second."
    if isinstance(value, str):
        match = NUMBER.fullmatch(value)
        if match is None:
            raise ConfigError(f"{setting}: {expected}")
        number = float(match[1]) * (_bandwidth_unit(match[2], setting, expected) if match[2] else 1.0)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        number = float(value)
    else:
        raise ConfigError(f"{setting}: {expected}")
    if not (math.isfinite(number) and number > 0):
        raise ConfigError(f"{setting}: {expected}")
    return number


def format_bandwidth(bytes_per_second: float) -> str:
    """Return a bandwidth as parse_bandwidth reads it: 950 B/s, 25.0 MB/s, 1.2 TB/s."""
    units = ["B/s", "KB/s", "MB/s", "GB/s", "TB/s"]
    while bytes_per_second >= 999.5 and len(units) > 1:
        bytes_per_second /= 1000
        units.pop(0)
    return f"{bytes_per_second:.0f} B/s" if units[0] == "B/s" else f"{bytes_per_second:.1f} {units[0]}"


def _bandwidth_unit(unit: str, setting: str, expected: str) -> float:
    if re.fullmatch(r"[KMGT]?i?b/s", unit, re.IGNORECASE) and "b" in unit:
        either = f"{unit[:-3].upper()[:1]}bit/s (bits) or {unit[:-3].capitalize()}B/s (bytes)"
        raise ConfigError(f"{setting}: {unit!r} may be bits or bytes. Write {either}.")
    bytes_by_unit = {name.upper(): number for name, number in BANDWIDTH_UNITS.items()}
    if unit.upper() not in bytes_by_unit:
        raise ConfigError(f"{setting}: the unit {unit!r} is not known{_near(unit, BANDWIDTH_UNITS)} {expected}")
    return bytes_by_unit[unit.upper()]


def _near(unit: str, units: dict[str, float]) -> str:
    """Return "; did you mean ...?" with similar units, ignoring case."""
    unit_names = {name.upper(): name for name in units}
    near = did_you_mean(unit.upper(), unit_names)
    for upper, name in unit_names.items():
        near = near.replace(f"{upper!r}", f"{name!r}")
    return near
