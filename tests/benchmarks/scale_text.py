"""Numbers for the words of docs/scale.md, which are in scale_page.md."""

from pathlib import Path

from tests.benchmarks.page import table
from tests.benchmarks.scale_checkpoints import Checkpoints
from tests.benchmarks.scale_formulas import (
    CROSS_NODE,
    DEVICE,
    FORMULAS,
    INTRA_NODE,
    Grouped,
    most_ids_for_links,
)
from tests.benchmarks.scale_points import Point, Points

GIBI, MEBI, GIGA, TERA = 2**30, 2**20, 1e9, 1e12
WORDS = Path(__file__).with_name("scale_page.md")
LINKED_RANKS = (16, 32, 64, 256, 1024, 4096)
EXAMPLE = Grouped(num_ranks=4096, group=512)
GROUPS = (EXAMPLE, Grouped(num_ranks=4096, group=256), Grouped(num_ranks=16384, group=512))
USABLE_BYTES = 68e9
"""Of an 80 GB GPU, less what is reserved where nobody says how much."""


def page(points: Points, checkpoints: Checkpoints) -> str:
    """Return the page."""
    fields = (
        _of_ranks(points.ranks)
        | _of_tables_and_rows(points)
        | _on_paper()
        | _of_checkpoints(checkpoints)
    )
    return WORDS.read_text(encoding="utf-8").format(**fields)


def _of_ranks(points: list[Point]) -> dict[str, str]:
    first, last = points[0], points[-1]
    facts, last_facts = first.planned.facts, last.planned.facts
    return {
        "num_tables": f"{first.job.num_tables:,}",
        "row_gb": f"{facts['row_bytes'] / GIGA:.0f}",
        "memory_gb": f"{first.job.memory_gb:g}",
        "least_ranks": f"{first.job.num_ranks:,}",
        "most_ranks": f"{last.job.num_ranks:,}",
        "ranks_table": _ranks_table(points),
        "ranks_times": f"{last.job.num_ranks / first.job.num_ranks:.0f}",
        "memory_times": f"{facts['device_bytes_mean'] / last_facts['device_bytes_mean']:.0f}",
        "bytes_times": f"{_sent(last) / _sent(first):.1f}",
        "away_mib": f"{sum(last_facts['across'].values()) / MEBI:.0f}",
        "slowest_ms": f"{last.planned.critical_path:.0f}",
        "mean_ms": f"{_mean(last):.0f}",
        "bound_ms": f"{last.planned.lower_bound:.0f}",
        "least_seconds": f"{first.planned.seconds:.0f}",
        "most_seconds": f"{last.planned.seconds:.0f}",
    }


def _ranks_table(points: list[Point]) -> str:
    rows = [
        [
            f"{p.job.num_ranks:,}",
            f"{p.planned.facts['device_bytes_mean'] / GIGA:.2f}",
            f"{p.planned.facts['device_bytes_max'] / GIGA:.2f}",
            f"{sum(p.planned.facts['within'].values()) / MEBI:.0f}",
            f"{sum(p.planned.facts['across'].values()) / MEBI:.0f}",
            f"{p.planned.facts['across_max'] / MEBI:,.0f}",
            f"{_mean(p):.1f}",
            f"{p.planned.critical_path:.1f}",
            f"{p.planned.lower_bound:.1f}",
            f"{p.planned.seconds:.0f}",
        ]
        for p in points
    ]
    header = [
        "ranks",
        "GB, mean",
        "GB, fullest",
        "MiB on the node",
        "MiB to other nodes",
        "... most of a rank",
    ]
    return table([*header, "ms, mean", "ms, slowest", "lower bound", "s to plan"], rows, 0)


def _of_tables_and_rows(points: Points) -> dict[str, str]:
    few, many = points.tables[0], points.tables[-1]
    small, large = points.rows[0], points.rows[-1]
    initial, final = small.planned.facts, large.planned.facts
    return {
        "base_ranks": f"{few.job.num_ranks:,}",
        "fewest_tables": f"{few.job.num_tables:,}",
        "most_tables": f"{many.job.num_tables:,}",
        "tables_times": f"{many.job.num_tables / few.job.num_tables:.0f}",
        "tables_ms_times": f"{many.planned.critical_path / few.planned.critical_path:.1f}",
        "few_over_mean": f"{few.planned.critical_path / _mean(few):.1f}",
        "many_over_mean": f"{many.planned.critical_path / _mean(many):.1f}",
        "rows_times": f"{final['row_bytes'] / initial['row_bytes']:.0f}",
        "most_rows_tb": f"{final['row_bytes'] / TERA:.0f}",
        "rows_memory_times": f"{final['device_bytes_mean'] / initial['device_bytes_mean']:.1f}",
        "rows_ms_times": f"{large.planned.critical_path / small.planned.critical_path:.2f}",
        "cuts_before": _cuts(small),
        "cuts_after": _cuts(large),
    }


def _on_paper() -> dict[str, str]:
    return {
        "intra": f"{INTRA_NODE / GIBI:.0f}",
        "cross": f"{CROSS_NODE / GIBI:.1f}",
        "device": f"{DEVICE / GIBI:.0f}",
        "near_over_far": f"{INTRA_NODE / CROSS_NODE:.0f}",
        "formulas_table": _formulas_table(),
        "links_table": table(
            ["ranks", *(f"{ranks:,}" for ranks in LINKED_RANKS)],
            [
                [
                    "ids an example",
                    *(f"{most_ids_for_links(ranks, 8, 128):.0f}" for ranks in LINKED_RANKS),
                ]
            ],
        ),
        "example_tables": f"{EXAMPLE.num_tables:,}",
        "example_tb": f"{EXAMPLE.table_bytes / TERA:.0f}",
        "example_dim": f"{EXAMPLE.dim}",
        "example_ids": f"{EXAMPLE.ids:.0f}",
        "example_batch": f"{EXAMPLE.batch_size}",
        "example_us": f"{1e6 * EXAMPLE.message_seconds:.0f}",
        "example_usable": f"{USABLE_BYTES / GIGA:.0f}",
        "example_least": f"{-(-EXAMPLE.table_bytes // USABLE_BYTES):.0f}",
        "groups_table": _groups_table(),
        "bytes_saved_ms": f"{1e3 * GROUPS[1].saved_byte_seconds:.1f}",
        "all_ranks_ms": f"{1e3 * GROUPS[1].exchange_seconds(False):.0f}",
        "most_distinct": f"{EXAMPLE.most_distinct_rows:.1f}",
    }


def _formulas_table() -> str:
    rows = [
        [f"`{t}`" for t in (cut, f.ids, f.rows, f.ids_across, f.rows_across)]
        for cut, f in FORMULAS.items()
    ]
    header = [
        "sharding type",
        "ids and lengths",
        "rows, one way",
        "ids to other nodes",
        "rows to other nodes, one way",
    ]
    return table(header, rows, len(header))


def _groups_table() -> str:
    rows = [
        [
            f"{g.num_ranks:,} in groups of {g.group}",
            f"{g.copies}",
            f"{g.bytes_per_rank / GIGA:.0f}",
            f"{1e3 * g.saved_byte_seconds:.1f}",
            f"{1e3 * g.saved_seconds:.0f}",
            f"{1e3 * g.average_seconds:,.0f}",
            f"{g.least_steps:,.1f}",
        ]
        for g in GROUPS
    ]
    header = [
        "ranks",
        "copies",
        "GB of rows a rank",
        "bytes save, ms",
        "messages save, ms",
        "one average, ms",
    ]
    return table([*header, "pays from n ="], rows)


def _of_checkpoints(measured: Checkpoints) -> dict[str, str]:
    num_bytes, ranks = 2 * 10 * TERA, 4096
    stall_of_rank = measured.stall_bytes_per_second / measured.num_ranks
    return {
        "saved_by": f"{measured.num_ranks}",
        "saved_gib": f"{measured.num_bytes / GIBI:.1f}",
        "saved_seconds": f"{measured.seconds:.2f}",
        "saved_rate": f"{measured.bytes_per_second / 1e6:,.0f}",
        "rank_rate": f"{measured.bytes_per_second_of_rank / 1e6:,.0f}",
        "stall_seconds": f"{measured.num_bytes / measured.stall_bytes_per_second:.2f}",
        "own_disks": f"{num_bytes / ranks / measured.bytes_per_second_of_rank:.0f}",
        "shared_minutes": f"{num_bytes / (10 * GIGA) / 60:.0f}",
        "copy_seconds": f"{num_bytes / ranks / stall_of_rank:.0f}",
        "files": f"{2 * ranks:,}",
    }


def _cuts(point: Point) -> str:
    """Return how many tables have which sharding type, in words."""
    cuts = sorted(point.planned.facts["sharding_types"].items(), key=lambda pair: -pair[1])
    return ", ".join(f"{number:,} `{cut}`" for cut, number in cuts)


def _sent(point: Point) -> float:
    return sum(sum(point.planned.facts[place].values()) for place in ("within", "across"))


def _mean(point: Point) -> float:
    return float(sum(point.planned.facts["milliseconds_mean"].values()))
