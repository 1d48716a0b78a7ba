"""A plan as one self-contained HTML file."""

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import numpy as np

from lightning_distrec.atomic_files import replace_file
from lightning_distrec.sharding.planning.planned_table import PlannedTable
from lightning_distrec.sharding.planning.report_text import (
    headline,
    ids_in_words,
    memory_in_words,
    rank_columns,
    replicas_in_words,
    sent_in_words,
    some_ranks_in_words,
    time_in_words,
    updates_in_words,
)
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from lightning_distrec.units import format_bytes

MAX_ROWS = 25
"""Longer tables are folded."""
QUANTILES = (
    ("minimum", 0.0),
    ("25th percentile", 0.25),
    ("median", 0.5),
    ("75th percentile", 0.75),
    ("maximum", 1.0),
)

STYLE = """
:root { color-scheme: light dark; --back: #ffffff; --text: #1c2024; --faint: #5f6670;
  --line: #dfe3e8; --card: #f6f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --back: #171717; --text: #e6e8ea; --faint: #a0a7af; --line: #33383f; --card: #202327; }
  img { filter: invert(0.91) hue-rotate(180deg); }
}
body { background: var(--back); color: var(--text); font: 16px/1.5 system-ui, sans-serif;
  margin: 2rem auto; max-width: 68rem; padding: 0 1.25rem; }
h1 { font-size: 1.6rem; line-height: 1.25; margin-bottom: 0.5rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 0.6rem; }
ul.findings { background: var(--card); border-radius: 8px; padding: 0.8rem 1rem 0.8rem 2rem; }
p.note, caption { color: var(--faint); font-size: 0.9rem; text-align: left; }
img { display: block; height: auto; margin: 1rem 0; max-width: 100%; }
.wide { overflow-x: auto; }
@media (max-width: 45rem) { .wide img { max-width: none; width: 44rem; } }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: 0.25rem 0.8rem 0.25rem 0; text-align: left;
  vertical-align: top; }
th { color: var(--faint); font-weight: 600; white-space: nowrap; }
td.number { text-align: right; white-space: nowrap; }
td.name { min-width: 8rem; overflow-wrap: anywhere; }
details > summary { cursor: pointer; }
"""


def write_page(path: str | Path, plan: ShardingPlan, pictures: dict[str, bytes]) -> None:
    """Write the page of a plan; it is complete, or not there.

    pictures: as `draw_plan` returns them. Folders are made.
    """
    replace_file(Path(path), page(plan, pictures).encode())


def write_pictures(folder: str | Path, pictures: dict[str, bytes]) -> None:
    """Write each picture into a file of its own, "plan_memory.png" and so on. Folders are made."""
    for name, data in pictures.items():
        replace_file(Path(folder) / f"plan_{name}.png", data)


def page(plan: ShardingPlan, pictures: dict[str, bytes]) -> str:
    """Return the page as HTML. pictures: see `write_page`."""
    title = escape(headline(plan))
    parts = [
        f"<h1>{title}</h1>",
        _findings(plan),
        f'<p class="note">{_assumptions(plan)}</p>',
    ]
    for name, data in pictures.items():
        # Pictures are inside of the page, so that it can be sent and opened as one file.
        source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        words = escape(name.replace("_", " "))
        parts.append(f'<div class="wide"><img alt="{words}" src="{source}"></div>')
    parts += ["<h2>Ranks</h2>", _ranks(plan), "<h2>Tables</h2>", _tables(plan)]
    if plan.origins:
        origins = _html_table(["quantity", "value", "origin"], plan.origins)
        parts += ["<h2>Where the numbers come from</h2>", origins]
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _findings(plan: ShardingPlan) -> str:
    findings = [
        memory_in_words(plan.memory, "GPU" if plan.on_gpu else "host"),
        "" if plan.host_memory is None else memory_in_words(plan.host_memory, "host"),
        time_in_words(plan) or "The time of a step is not known: the plan was not estimated",
        updates_in_words(plan),
        sent_in_words(plan),
        ids_in_words(plan),
        replicas_in_words(plan),
    ]
    items = "".join(f"<li>{escape(finding)}.</li>" for finding in findings if finding)
    return f'<ul class="findings">{items}</ul>'


def _assumptions(plan: ShardingPlan) -> str:
    comms = plan.comms
    types = "float32" if comms.is_exact else f"{comms.forward}, their gradients as {comms.backward}"
    text = (
        f"Estimates for {plan.batch_size:,} examples per rank and step; rows are sent as {types}."
    )
    if plan.layout.num_ranks > 1:
        text += " Reductions over ranks are assumed to use rings."
    return escape(text)


def _ranks(plan: ShardingPlan) -> str:
    """Return memory, time and traffic of each rank; of many ranks, percentiles."""
    columns = rank_columns(plan)
    num_ranks = plan.num_ranks
    headings = [name for name, _, _ in columns]
    rows = []
    if num_ranks <= MAX_ROWS:
        for rank in range(num_ranks):
            cells = [text(float(values[rank])) for _, values, text in columns]
            rows.append([str(rank), *cells])
        return _html_table(["rank", *headings], rows)
    for name, quantile in QUANTILES:
        row = [name]
        for _, values, text in columns:
            # The value of some rank, so that one rank may be looked for.
            row.append(text(float(np.quantile(values, quantile, method="nearest"))))
        rows.append(row)
    return _html_table([f"{num_ranks:,} ranks", *headings], rows)


def _tables(plan: ShardingPlan) -> str:
    headings = ["table", "rows x dim", "bytes", "largest shard", "ids per example"]
    headings += ["sharding type", "lookup kernel", "update", "ranks"]
    ordered = sorted(plan.tables.values(), key=lambda table: -table.num_bytes)
    shown = _html_table(headings, map(_row, ordered[:MAX_ROWS]))
    if len(ordered) <= MAX_ROWS:
        return shown
    remainder = _html_table(headings, map(_row, ordered[MAX_ROWS:]))
    return (
        f"{shown}\n<details><summary>The other {len(ordered) - MAX_ROWS:,} "
        f"tables</summary>{remainder}</details>"
    )


def _row(table: PlannedTable) -> list[str]:
    kind = "" if table.pooled else " (one vector per id)"
    return [
        table.name,
        f"{table.num_rows:,} x {table.dim}",
        format_bytes(table.num_bytes),
        format_bytes(table.largest_shard_bytes),
        f"{sum(table.pooling_factors):.3g}{kind}",
        table.sharding_type,
        table.compute_kernel,
        table.update,
        some_ranks_in_words(sorted(set(table.ranks.tolist()))),
    ]


def _html_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; cells that begin with a digit are numbers."""
    lines = []
    for tag, row in [("th", headings), *(("td", row) for row in rows)]:
        cells = []
        for cell in row:
            kind = "number" if cell[:1].isdigit() else "name"
            cells.append(f'<{tag} class="{kind}">{escape(cell)}</{tag}>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(lines)
    return f'<div class="wide"><table>\n{body}\n</table></div>'
