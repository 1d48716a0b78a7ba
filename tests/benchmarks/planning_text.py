"""What stands around the tables of the section about planning."""

BEGIN, END = "<!-- planning: begin -->", "<!-- planning: end -->"
PROBLEMS = """\
Published problems: `mlperf` is the tables of MLPerf's DLRM-DCNv2, 26 of up to 40 million rows x 128. They have up to
100 ids an example, and all ranks together 65,536 examples. `torchrec` is those of TorchRec's own planner tests:
100 rows, and 12 columns in place of 10, which FBGEMM does not take.
`zipf` as below. TorchRec's planner gets ten minutes."""
DETAILS = "performance_planning.csv"
"""The file next to the page that has every set of tables."""


def section(
    summary: str,
    times: str,
    problems: str,
    notes: list[str],
    *,
    machine: str,
    limit_seconds: float,
    load: float,
) -> str:
    """Return the section, lines that mark it included.

    summary, times, problems: tables. notes: what went wrong. machine: in words. load: the
    machine's, before the run.
    """
    parts = [
        BEGIN,
        "## Planning",
        f"""\
`python -m tests.benchmarks.planning --write` writes this section and its numbers, on {machine}, at a load of
{load:.1f}. Critical paths do not depend on the load: the search counts its steps.""",
        summary,
        *(["\n".join(notes)] if notes else []),
        """\
Seconds are those of one thread's processor; 300 of the MiB are torch and torchrec. "Default" is torchrec's
`EmbeddingShardingPlanner`, where it ends within minutes. Sets are named by kind.""",
        times,
        *([PROBLEMS, problems] if problems else []),
        f"""\
The critical path is the estimated time of a step for tables, see [plans](how_to/plans.md#how-the-planner-decides); of
the default planner's plans too.
The default planner has the same memory, constraints and bandwidths, and {limit_seconds:.0f} seconds for each set.
[This file]({DETAILS}) has a line for each set, drawn from seeds. `uniform` has 10 thousand to 5 million rows a table,
`zipf` 50 million over the table's number, `giant` one table of 200 million, `tiny` thousands.""",
        END,
    ]
    return "\n\n".join(part for part in parts if part)
