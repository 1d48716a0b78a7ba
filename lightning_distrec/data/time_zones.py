"""When a time zone's offset from UTC changes: written down with what is fitted, so that serving has
the same hours, whatever time zones its machine knows."""

from bisect import bisect_left
from datetime import datetime, timedelta, timezone, tzinfo
from functools import cache
from zoneinfo import ZoneInfo

from lightning_distrec.errors import ConfigError

DAY = 86_400
FIRST_DAY = -62_092
"""1800-01-01: earlier, zones have the mean time of their place."""
LAST_DAY = 84_006
"""2200-01-01: later, the last offset stays."""


def zone_of(name: str) -> tzinfo:
    """Return a time zone. Raises ConfigError: this machine does not know it."""
    try:
        return timezone.utc if name == "UTC" else ZoneInfo(name)
    except (LookupError, OSError, ValueError) as error:
        raise ConfigError(
            f"zone={name!r} is no time zone of this machine: use an IANA name such as "
            "Europe/Zurich. If there are none, install them: pip install tzdata."
        ) from error


@cache
def offsets_in(name: str) -> tuple[list[int], list[int]]:
    """Return when offsets begin, in seconds since 1970, and the offsets in seconds; until 2200."""
    zone = zone_of(name)

    def offset_at(seconds: int) -> int:
        offset = datetime.fromtimestamp(seconds, zone).utcoffset()
        return offset // timedelta(seconds=1) if offset else 0

    starts = [FIRST_DAY * DAY]
    offsets = [offset_at(starts[0])]
    # Two changes are three days apart or more, in all zones.
    for midnight in range(starts[0] + DAY, LAST_DAY * DAY, DAY):
        offset = offset_at(midnight)
        if offset != offsets[-1]:
            day = range(midnight - DAY, midnight)
            starts.append(day[0] + bisect_left(day, True, key=lambda s: offset_at(s) == offset))
            offsets.append(offset)
    return starts, offsets
