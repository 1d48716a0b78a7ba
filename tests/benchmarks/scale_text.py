"""The words of docs/scale.md; every number in them comes from plans, formulas, or a page that measured it."""

from tests.benchmarks.page import table
from tests.benchmarks.scale_checkpoints import Checkpoints
from tests.benchmarks.scale_formulas import CROSS_NODE, DEVICE, FORMULAS, INTRA_NODE, Grouped, most_ids_for_links
from tests.benchmarks.scale_points import Point, Points

GIBI, MEBI, GIGA = 2**30, 2**20, 1e9


def page(points: Points, checkpoints: Checkpoints) -> str:
    """Return the page."""
    return "\n\n".join([*_plans(points), *_paper(), *_groups(), *_checkpoints(checkpoints)]) + "\n"


def _plans(points: Points) -> list[str]:
    first, last = points.ranks[0], points.ranks[-1]
    job = first.job
    return [
        "# How it scales",
        f"""\
What tables cost as ranks, tables and rows grow, up to {last.job.num_ranks:,} ranks. **Nothing on this page was run on that many
ranks.** Plans were made for them on one core, and the rest was reckoned from the plans. What was measured is said to be: the
time and memory of planning, and the checkpoints of two ranks. Bytes are those that 2 and 4 real gloo ranks were counted to send,
[to the byte](planning.md#what-is-reckoned-to-be-sent); above 4 they are reckoned by the same code. Milliseconds are
torchrec's estimates for GPUs, which nothing here was held against: read ratios and slopes, not values.""",
        "This page is written by `python -m tests.benchmarks.scale`, which leaves its numbers in [scale.json](images/scale.json).",
        f"""\
The tables: {job.num_tables:,} of bags, of 50 million rows over the table's number, 16 to 256 columns of 4 bytes, 1 to 200 ids an
example, {first.planned.facts["row_bytes"] / GIGA:.0f} GB of rows together. Ranks: 8 on a node, {job.memory_gb:.0f} GB of a GPU for tables and 128 GB of the host's
memory; {INTRA_NODE / GIBI:.0f} GiB/s within a node, {CROSS_NODE / GIBI:.1f} between nodes, {DEVICE / GIBI:.0f} in the GPU's memory, for each rank (torchrec's defaults). Each
rank has a batch of 512 examples, so that the global batch grows with the ranks.""",
        "## Ranks",
        _of_ranks(points.ranks),
        "![memory of a rank](images/scale_memory.png)",
        "![bytes of a rank and step](images/scale_bytes.png)",
        "![estimated time of a step](images/scale_time.png)",
        _about_ranks(first, last),
        "## Tables and rows",
        "![tables and rows](images/scale_tables_rows.png)",
        _about_tables_and_rows(points),
        "## Time to plan",
        "![time to plan](images/scale_planning.png)",
        f"""\
Measured, one thread's time of the processor, on a machine that others used too. Shards of one size cost alike, so that only one of
them is shown to torchrec's estimators, and the search looks at a number of moves that is limited by tables and ranks: that is why
{last.job.num_ranks:,} ranks take {last.planned.seconds:.0f} s and {first.job.num_ranks} take {first.planned.seconds:.0f} s. Against torchrec's planner: [how fast](performance.md#planning).""",
    ]


def _of_ranks(points: list[Point]) -> str:
    rows = [
        [
            f"{p.job.num_ranks:,}",
            f"{p.planned.facts['device_bytes_mean'] / GIGA:.2f}",
            f"{p.planned.facts['device_bytes_max'] / GIGA:.2f}",
            f"{sum(p.planned.facts['within'].values()) / MEBI:.0f}",
            f"{sum(p.planned.facts['across'].values()) / MEBI:.0f}",
            f"{p.planned.facts['across_max'] / MEBI:.0f}",
            f"{sum(p.planned.facts['milliseconds_mean'].values()):.1f}",
            f"{p.planned.critical_path:.1f}",
            f"{p.planned.lower_bound or 0:.1f}",
            f"{p.planned.seconds:.0f}",
        ]
        for p in points
    ]
    header = ["ranks", "GB, mean", "GB, fullest", "MiB on the node", "MiB to other nodes", "... the most of a rank"]
    return table([*header, "ms, mean", "ms, slowest", "lower bound", "planned in s"], rows, 0)


def _about_ranks(first: Point, last: Point) -> str:
    times = last.job.num_ranks / first.job.num_ranks
    per_rank = [sum(p.planned.facts["within"].values()) + sum(p.planned.facts["across"].values()) for p in (first, last)]
    away = sum(last.planned.facts["across"].values()) / per_rank[1]
    return f"""\
- **Memory**: rows are shared out; what a GPU holds besides grows with the global batch, because a whole table's rank looks up all
  ranks' ids. {times:.0f} times as many ranks hold {first.planned.facts["device_bytes_mean"] / last.planned.facts["device_bytes_mean"]:.1f} times less each.
- **Bytes**: a rank sends {per_rank[1] / per_rank[0]:.1f} times as much on {last.job.num_ranks:,} ranks as on {first.job.num_ranks}, and {away:.0%} of it to other nodes.
- **Time**: the global batch of a table that stays whole is one rank's work. On {last.job.num_ranks:,} ranks the slowest has
  {last.planned.critical_path:.0f} ms to do where the mean has {sum(last.planned.facts["milliseconds_mean"].values()):.0f}, and no plan can be below {last.planned.lower_bound or 0:.0f}: the longest shard. Narrower columns
  (`min_partition`, 128 columns where it is not set) and `table_row_wise` are what makes it shorter; more ranks do not."""


def _about_tables_and_rows(points: Points) -> str:
    small, large = points.rows[0], points.rows[-1]
    few, many = points.tables[0], points.tables[-1]
    times = large.planned.facts["row_bytes"] / small.planned.facts["row_bytes"]
    return f"""\
- **Tables**: {many.job.num_tables / few.job.num_tables:.0f} times as many take {many.planned.critical_path / few.planned.critical_path:.1f} times as long. Few tables on many ranks leave ranks idle: the critical
  path of {few.job.num_tables} tables is {few.planned.critical_path / sum(few.planned.facts["milliseconds_mean"].values()):.1f} times the mean of the ranks, that of {many.job.num_tables:,} {many.planned.critical_path / sum(many.planned.facts["milliseconds_mean"].values()):.1f} times.
- **Rows**: {times:.0f} times as many ({large.planned.facts["row_bytes"] / 1e12:.0f} TB) take {large.planned.facts["device_bytes_mean"] / small.planned.facts["device_bytes_mean"]:.1f} times the memory, and {large.planned.critical_path / small.planned.critical_path:.2f} times as long a step. What is exchanged does not depend on them,
  until a table must be cut by rows over all ranks because it fits on no node: {large.planned.facts["cuts"].get("row_wise", 0)} of {large.job.num_tables:,} here, against {small.planned.facts["cuts"].get("row_wise", 0)}."""


def _paper() -> list[str]:
    return [
        "## On paper: bytes by cut",
        """\
R ranks, L on a node, N = R / L nodes, B examples a rank, one feature with p ids an example, a table of H rows of D columns. Bytes
that a rank sends in a step, the mean over ranks, rows and gradients of 4 bytes. Each way for rows and gradients alike;
`data_parallel` sends gradients of the whole table once. [A test](../tests/unit/test_scale_benchmark.py) evaluates these
expressions against [what is reckoned for plans](planning.md#what-is-reckoned-to-be-sent).""",
        _formulas(),
        """\
Column-wise cuts are `table_wise` with the ids once for each shard. Besides, every pair of ranks tells 24 bytes of sizes for each
collection and cut. Rings: on average 1 / L of what they carry leaves a node, where each node's last rank hands on to the next
node's first; it is that rank's link which has to carry all of it, unless the backend shares it out.""",
        "![one table, cut in four ways](images/scale_cuts.png)",
        """\
B = 512, D = 128, p = 10, H = 1 million, L = 8. Whole tables and `table_row_wise` send a rank the same however many ranks there are.
`row_wise` adds up the bags of *all* ranks in a ring: R - 1 times as much. It is for tables that fit on no node.""",
        "## On paper: when links between nodes decide",
        f"""\
For whole tables, what crosses nodes takes `(R - L) / R * (8 * (1 + p) + 8 * D) * B / cross_node` seconds a table, what stays
`(L - 1) / R * ... / intra_node`, and lookups `12 * p * D * B / device_memory` (a row is read, and read and written in backward).
Without lookups, links between nodes decide from the second node on wherever `cross_node < L / (L - 1) * intra_node`; torchrec's
defaults are {INTRA_NODE / CROSS_NODE:.0f} to 1. Lookups hide it only where there are many ids: D = 128 and L = 8, up to so many ids an example
do links decide:""",
        _links(),
    ]


def _formulas() -> str:
    rows = [
        [f"`{cut}`", *(f"`{e}`" for e in (f.ids, f.rows, f.ids_across, f.rows_across))] for cut, f in FORMULAS.items()
    ]
    return table(["cut", "ids", "rows, one way", "ids to other nodes", "rows to other nodes, one way"], rows, 5)


def _links() -> str:
    ranks = (16, 32, 64, 256, 1024, 4096)
    return table(
        ["ranks", *(f"{r:,}" for r in ranks)], [["ids an example", *(f"{most_ids_for_links(r, 8, 128):.0f}" for r in ranks)]]
    )


def _groups() -> list[str]:
    in_node, wider = Grouped(num_ranks=4096, group=512), Grouped(num_ranks=4096, group=256)
    rows = [
        [
            f"{g.num_ranks:,} in groups of {g.group}",
            f"{g.copies}",
            f"{g.bytes_per_rank / GIGA:.0f}",
            f"{1e3 * g.saved_byte_seconds:.1f}",
            f"{1e3 * g.saved_seconds:.0f}",
            f"{1e3 * g.average_seconds:,.0f}",
            f"{g.least_steps:,.0f}",
        ]
        for g in (in_node, wider, Grouped(num_ranks=16384, group=512))
    ]
    header = ["ranks", "copies", "GB of rows a rank", "saved by bytes, ms", "saved by messages, ms", "one average, ms"]
    usable = 68 * GIGA
    return [
        "## On paper: two dimensions (not built here)",
        f"""\
torchrec's `DMPCollection` lets groups of G ranks hold all tables each, K = R / G copies, and averages the copies' weights. **This
project does not do that**: all ranks hold one copy. It has a price in numbers, too: except for plain SGD averaged after every step,
training is no longer that of the unsharded module.

What it saves, for S bytes of rows in T tables that stay whole: messages, `3 * a * (R - G)` seconds, where each of the three
exchanges of a step costs `a` seconds for each rank that takes part; and bytes, `T * B * (8 * (1 + p) + 8 * D) * (L / G - L / R) /
cross_node`, but only where a group's ranks follow one another. torchrec's default puts the copies of a shard on one node instead, so
that the average is fast; a group then spans as many nodes as before, and no fewer bytes cross them. `row_wise` tables would
add up over G ranks in place of R.

What it costs: K times the memory, and an average of weights every n steps, `2 * (K - 1) / K * S / G` bytes over `intra_node` while
K is at most L, over `cross_node` above. Averages of optimizer state would add to it. Groups pay where

`n >= 2 * (K - 1) / K * S / G / bandwidth / (3 * a * (R - G))`

**An example**: {in_node.num_tables:,} tables, {in_node.table_bytes / 1e12:.0f} TB, D = {in_node.dim}, p = {in_node.ids:.0f}, B = {in_node.batch_size}, a = {1e6 * in_node.message_seconds:.0f} µs (assumed; measure it before you believe this). With {usable / GIGA:.0f} GB
for rows on a rank, G is at least {-(-in_node.table_bytes // usable):.0f}.""",
        table([*header, "pays from n ="], rows),
        "![groups of ranks](images/scale_groups.png)",
        f"""\
So bytes are no reason for two dimensions while tables stay whole: {1e3 * wider.saved_byte_seconds:.1f} ms of {1e3 * wider.exchange_seconds(False):.0f}. Messages are, beyond some thousand ranks, as
long as the copies share a node: then an average after every step takes about what it saves. Where copies are on several nodes, only
averages that are hundreds of steps apart pay.

Averaging **touched rows only** would be K - 1 times `T * B * p * u * (4 * D + 8)` bytes a rank and step, where u is the share of a
step's ids that are distinct. Over the same links, that is less than what groups save in bytes only where about `p * u < 2 * L / R`:
on 4,096 ranks, where 250 ids and more hit one row. It pays for the messages where it stays on the node.""",
    ]


def _checkpoints(measured: Checkpoints) -> list[str]:
    tera = 2 * 10e12
    return [
        "## Checkpoints",
        f"""\
Measured: {measured.num_ranks} ranks saved {measured.num_bytes / GIBI:.1f} GiB to one disk in {measured.seconds:.2f} s, {measured.bytes_per_second / 1e6:,.0f} MB/s together; an asynchronous save let training go
on after {measured.num_bytes / measured.stall_bytes_per_second:.2f} s ([how fast](performance.md#checkpoints)).

**Extrapolated** from that, dashed: every rank writes its own shards and their state and nothing else, so that a rank's part falls with
the ranks, and the time is that of the disks. 10 TB of rows with as much of Adagrad's state take 4,096 ranks
{tera / 4096 / measured.bytes_per_second_of_rank:.0f} s if each has the {measured.bytes_per_second_of_rank / 1e6:.0f} MB/s that a rank had here, and {tera / (10 * GIGA) / 60:.0f} minutes on a file system that takes 10 GB/s from all of them. Training would wait
{tera / 4096 * measured.num_ranks / measured.stall_bytes_per_second:.0f} s for the copy of an asynchronous save. Not in it: what a file system does with {2 * 4096:,} files, and the metadata of all shards,
which rank 0 gathers and writes.""",
        "![saving checkpoints](images/scale_checkpoints.png)",
    ]
