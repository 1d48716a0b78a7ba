"""The page of a plan says what the plan holds, at any size, and needs nothing beside it."""

import base64
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from lightning_distrec.observe import plan_pictures
from lightning_distrec.observe.plan_page import (
    page,
)
from lightning_distrec.observe.plan_pictures import draw_plan
from lightning_distrec.sharding.planning.sharding_plan import PlanCost, ShardingPlan
from lightning_distrec.sharding.sharders import QuantizedComms
from lightning_distrec.sharding.sharding_groups import NodeLayout
from lightning_distrec.units import format_bytes
from tests.support.planned import planned, planned_at_random

GIB = 2**30
LONE = {"meta", "img"}
"""Elements without an end."""


class Read(HTMLParser):
    """Reads a page as a browser does: the rows of its tables, the texts of other elements, its
    pictures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.rows: list[list[str]] = []
        self.texts: dict[str, list[str]] = {}
        self.pictures: list[bytes] = []
        self.tags: set[str] = set()
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "img":
            kind, _, data = str(dict(attrs)["src"]).partition("base64,")
            assert kind == "data:image/png;"
            assert self.open[-1] == "div"  # a picture scrolls by itself on a phone
            self.pictures.append(base64.b64decode(data))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in LONE:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        elif self.open and data.strip():
            self.texts.setdefault(self.open[-1], []).append(data)


def two_ranks(**changes: Any) -> ShardingPlan:
    """Return a plan of two tables over two ranks, on which 1 GiB each is usable."""
    layout = NodeLayout.equal(2, 2)
    tables = [
        planned(
            sharding_type="table_wise",
            layout=layout,
            name="ebc.users",
            num_rows=2**24,
            dim=8,
            ranks=[1],
        ),
        planned(sharding_type="row_wise", layout=layout, name="ebc.items", num_rows=2**20, dim=8),
    ]
    usual: dict[str, Any] = {
        "tables": {table.name: table for table in tables},
        "device": "cpu",
        "layout": layout,
        "batch_size": 512,
        "comms": QuantizedComms(),
        "memory_bytes": int(1.25 * GIB),
        "usable_bytes": GIB,
    }
    return ShardingPlan(**usual | changes)


def costs(ms: list[float], device_gib: list[float], host_gib: list[float]) -> PlanCost:
    """Return a cost of which every part takes as long of the time."""
    return PlanCost(
        milliseconds=np.array(ms)[:, None].repeat(7, 1) / 7,
        device_bytes=np.array([int(size * GIB) for size in device_gib]),
        host_bytes=np.array([int(size * GIB) for size in host_gib]),
        device_bytes_usable=np.full(len(ms), GIB),
        host_bytes_usable=np.full(len(ms), 4 * GIB),
    )


def test_the_page_of_two_ranks_shows_what_they_hold_take_and_send() -> None:
    facts = two_ranks(
        cost=costs([2.0, 3.0], [0.25, 0.75], [0.0, 1.0]), device="cuda", dense_bytes=3 * 2**20
    )
    read = Read(page(facts, draw_plan(facts)))
    assert read.texts["h1"] == ["2 tables over 2 ranks: all tables fit"]
    sent = facts.traffic.sent()
    assert read.texts["li"] == [
        "Rank 1, the fullest, fills 75% of its GPU memory: 768.0 MiB of 1.0 GiB.",
        "Rank 1, the fullest, fills 25% of its host memory: 1.0 GiB of 4.0 GiB.",
        "Estimated time for tables, per step: 3 ms on the slowest rank (1), 2.5 ms on average.",
        f"Estimated bytes sent for tables, per rank and step: {format_bytes(sent.mean())}; most "
        "by rank "
        f"{sent.argmax()}: {format_bytes(sent.max())}.",
        "Estimates take each example to have 2 to 3 ids per feature; planning.estimate_pooling "
        "counts them.",
    ]
    ranks = {row[0]: row[1:] for row in read.rows if row[0] in "01"}
    first = "256.0 MiB|16.0 MiB|240.0 MiB|1.0 GiB|3.0 MiB|0 B|2 ms"
    assert ranks["0"][:7] == first.split("|")
    second = "768.0 MiB|528.0 MiB|240.0 MiB|1.0 GiB|3.0 MiB|1.0 GiB|3 ms"
    assert ranks["1"][:7] == second.split("|")
    users = next(row for row in read.rows if row[0] == "ebc.users")
    whole = "16,777,216 x 8|512.0 MiB|512.0 MiB|5|table_wise|fused|fused|1"
    assert users[1:] == whole.split("|")
    items = next(row for row in read.rows if row[0] == "ebc.items")
    cut = "1,048,576 x 8|32.0 MiB|16.0 MiB|5|row_wise|fused|fused|0, 1"
    assert items[1:] == cut.split("|")
    assert len(read.pictures) == 5


def test_names_and_origins_are_escaped() -> None:
    layout = NodeLayout.equal(1, 1)
    name = "ebc.<script>alert('$x$')</script>&\"t\""
    facts = two_ranks(
        tables={name: planned(sharding_type="table_wise", layout=layout, name=name)},
        layout=layout,
        origins=[("bandwidth <b>", "1 & 2", "LIGHTNING<i>")],
    )
    read = Read(page(facts, draw_plan(facts)))
    assert "script" not in read.tags
    assert {"b", "i"} & read.tags == set()
    cells = [cell for row in read.rows for cell in row]
    assert name in cells
    assert ["bandwidth <b>", "1 & 2", "LIGHTNING<i>"] in read.rows
    assert "Nothing is sent: there is only one rank." in read.texts["li"]


def test_a_page_of_many_tables_over_many_ranks_tells_ranks_by_quantiles() -> None:
    facts = planned_at_random(300, NodeLayout.equal(256, 8), seed=3, cost=True, on_gpu=True)
    text = page(facts, draw_plan(facts))
    read = Read(text)
    assert read.texts["h1"][0].startswith("300 tables over 256 ranks on 32 nodes")
    names = [row[0] for row in read.rows]
    assert len([name for name in names if name.startswith("model.")]) == 300
    assert read.texts["summary"] == ["The other 275 tables"]
    most = next(row for row in read.rows if row[0] == "maximum")
    assert most[1] == format_bytes(float(facts.memory.tables.max()))
    half = next(row for row in read.rows if row[0] == "median")
    assert half[1] == format_bytes(float(np.sort(facts.memory.tables)[128]))
    assert len(names) < 330
    assert len(text) < 1_000_000
    assert len(read.pictures) == 5


def test_bars_of_ranks_have_the_heights_of_their_numbers() -> None:
    facts = two_ranks(cost=costs([2.0, 3.0], [0.25, 0.75], [0.0, 0.0]), device="cuda")
    axes = plan_pictures._draw_memory(facts).axes[0]
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in axes.containers}
    assert heights == {
        "rows": pytest.approx([256 - 240, 768 - 240]),
        "exchange and cache": pytest.approx([240, 240]),
    }
    assert axes.get_ylabel() == "MiB of GPU memory"
    (limit,) = axes.lines
    assert (limit.get_label(), limit.get_ydata()[0]) == ("usable for tables", 1024)
    axes = plan_pictures._draw_time(facts).axes[0]
    assert [[bar.get_height() for bar in bars] for bars in axes.containers] == pytest.approx(
        np.full((7, 2), [2 / 7, 3 / 7])
    )
