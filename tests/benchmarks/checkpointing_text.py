"""What stands around the tables of the section about checkpoints, and where it stands in the page."""

BEGIN, END = "<!-- checkpointing: begin -->", "<!-- checkpointing: end -->"
BEFORE = "## On a GPU"
"""The heading that a new section is put before."""


def section(
    summary: str, seconds: str, notes: list[str], *, machine: str, size: str, file_system: str, rounds: int
) -> str:
    """Return the section, lines that mark it included.

    summary, seconds: tables. notes: what went wrong, or is missing. machine, size (of the tensors): in words.
    """
    parts = [
        BEGIN,
        "## Checkpoints",
        f"""\
This section is written by `python -m tests.benchmarks.checkpointing`, every number in it by the run, on {machine}.
What is saved: the DLRM from above with larger tables and `torch.optim.Adagrad` inside of backward, {size}, half of it
weights and half of it Adagrad's state. It is saved by 2 ranks, `table_wise`, and loaded by 1, `table_wise`, and by 3,
`row_wise`. The file system is {file_system}.""",
        summary,
        *(["\n".join(notes)] if notes else []),
        f"""\
Ratios are medians of the ratios of {rounds} rounds, after one round to warm up; in a round all contenders take turns in
the same processes, in another order each time. The slowest rank's time counts. Every round compares bitwise what was
saved, or loaded, with what should be.

- **Save**: `trainer.save_checkpoint` in the middle of a fit, until the folder is complete and on disk, against
  `torch.distributed.checkpoint.save` of torchrec's own ShardedTensors by torch's writer with its defaults, which wait
  for the disk, too; and against `dd conv=fsync` of as many bytes, one for each rank at once. Nothing is left to be
  written when a turn begins.
- **Async save**: how long `trainer.save_checkpoint` takes to return, while no other write is under way, against
  `clone()` of each of the rank's shards, and against `copy_` into memory that was used before. Training goes on behind
  it: the median step until the folder is complete, against the median step before.
- **Load**: the three methods of the strategy that Lightning calls for `ckpt_path`, against
  `torch.distributed.checkpoint.load` of what the bare save wrote, into the same shards. Both files are in the page
  cache.
- **Growth** of a process is its VmHWM, which the kernel keeps for us from the beginning of each measurement, over what
  it had then.""",
        seconds,
        END,
    ]
    return "\n\n".join(parts)


def with_section(page: str, text: str, begin: str = BEGIN, end: str = END) -> str:
    """Return a page with this section in the place of the one that it has, or before BEFORE, or at its end.

    begin, end: the lines that mark it.
    """
    found = section_of(page, begin, end)
    if found is not None:
        return page.replace(found, text)
    if f"\n{BEFORE}\n" in page:
        return page.replace(f"\n{BEFORE}\n", f"\n{text}\n\n{BEFORE}\n", 1)
    return f"{page.rstrip()}\n\n{text}\n"


def section_of(page: str, begin: str = BEGIN, end: str = END) -> str | None:
    """Return the section of a page, lines that mark it included; None where it has none."""
    first, last = page.find(begin), page.find(end)
    return page[first : last + len(end)] if 0 <= first < last else None


def with_section_of(old: str, page: str) -> str:
    """Return a page that was written anew with the section of the one before."""
    kept = section_of(old)
    return page if kept is None else with_section(page, kept)
