"""What stands around the tables of the section about planning."""

BEGIN, END = "<!-- planning: begin -->", "<!-- planning: end -->"


def section(
    summary: str, times: str, compared: str, notes: list[str], *, machine: str, limit_seconds: float, load: float
) -> str:
    """Return the section, lines that mark it included.

    summary, times, compared: tables. notes: what went wrong. machine: in words. load: the machine's, before the run.
    """
    parts = [
        BEGIN,
        "## Planning",
        f"""\
This section is written by `python -m tests.benchmarks.planning --write`, every number in it by the run, on {machine}.
The machine was shared: its load was {load:.1f} when the run began, so that seconds would be somewhat fewer on one that
does nothing else. Critical paths do not depend on it: the search counts its moves, it does not time them.""",
        summary,
        *(["\n".join(notes)] if notes else []),
        """\
**Time to plan** is the time of the processor in `make_plan`, on one thread, in a process of its own; beside it the most
memory that the process had, 350 MiB of which are torch and torchrec. torchrec's `EmbeddingShardingPlanner` is given the
same tables where it comes to an end within minutes.""",
        times,
        f"""\
**Quality**: the critical path is what the slowest rank spends on tables in a step, as torchrec's own estimators reckon
it for both plans alike, the exchange of ids included; nothing is trained here. The ratio is ours over that of
torchrec's default planner, which has the same memory, constraints and bandwidths (torchrec's defaults), and up to
{limit_seconds:.0f} seconds of the
processor for each set. The lower bound is what no plan can be below: all work shared out evenly, or the longest shard
that cannot be avoided. It need not be within reach. Sets are drawn from seeds: `uniform` has 10 thousand to 5 million
rows a table, `zipf` 50 million over the table's number, `giant` one table of 200 million beside small ones, `tiny`
thousands.""",
        compared,
        END,
    ]
    return "\n\n".join(part for part in parts if part)
