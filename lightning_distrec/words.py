"""How numbers and lists are said, wherever people read them."""

from collections.abc import Sequence


def counted(number: int, what: str) -> str:
    """Return "1 rank", "2 ranks" and so on."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def few_of(words: Sequence[str], most: int) -> str:
    """Return up to `most` of the words, and how many there are besides."""
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return "0-3" for [0, 1, 2, 3], "0, 2" for [0, 2]."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(map(str, ranks))


def bytes_in_words(number: float) -> str:
    """Return a number of bytes: 950 B, 12.3 KiB, 1.2 MiB."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while number >= 1023.5 and len(units) > 1:
        number /= 1024
        units.pop(0)
    return f"{number:.0f} B" if units[0] == "B" else f"{number:.1f} {units[0]}"
