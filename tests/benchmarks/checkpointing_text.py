"""What stands around the tables of the section about checkpoints, and where it stands in the
page."""

BEGIN, END = "<!-- checkpointing: begin -->", "<!-- checkpointing: end -->"
BEFORE = "## On a GPU"
"""The heading that a new section is put before."""


def section(
    summary: str,
    seconds: str,
    notes: list[str],
    *,
    machine: str,
    size: str,
    file_system: str,
    rounds: int,
) -> str:
    """Return the section, lines that mark it included.

    summary, seconds: tables. notes: what went wrong, or is missing. machine, size (of the tensors):
    in words.
    """
    parts = [
        BEGIN,
        "## Checkpoints",
        f"""\
`python -m tests.benchmarks.checkpointing` writes this section and its numbers, on {machine}. {size}, half weights and
half Adagrad's state, are saved by 2 ranks (`table_wise`) and loaded by 1 (`table_wise`) and by 3 (`row_wise`). The file
system is {file_system}.""",
        summary,
        *(["\n".join(notes)] if notes else []),
        f"""\
Medians of {rounds} rounds, contenders in turns, the slowest rank's time; every round compares bitwise. A save counts
until it is complete on disk. `dd` runs with `conv=fsync`, once per rank. Fresh memory: `clone()` of the shards; memory
that is there: `copy_`. Growth is VmHWM.""",
        seconds,
        END,
    ]
    return "\n\n".join(parts)


def with_section(page: str, text: str, begin: str = BEGIN, end: str = END) -> str:
    """Return a page with this section in the place of the one that it has, or before BEFORE, or at
    its end.

    begin, end: the lines that mark it.
    """
    actual = section_of(page, begin, end)
    if actual is not None:
        return page.replace(actual, text)
    if f"\n{BEFORE}\n" in page:
        return page.replace(f"\n{BEFORE}\n", f"\n{text}\n\n{BEFORE}\n", 1)
    return f"{page.rstrip()}\n\n{text}\n"


def section_of(page: str, begin: str = BEGIN, end: str = END) -> str | None:
    """Return the section of a page, lines that mark it included; None where it has none."""
    first, last = page.find(begin), page.find(end)
    return page[first : last + len(end)] if 0 <= first < last else None


def with_section_of(old: str, page: str) -> str:
    """Return a page that was written anew with the section of the one before."""
    retained = section_of(old)
    return page if retained is None else with_section(page, retained)
