"""What docs/scale.md says on paper, against what is reckoned for plans; and the way from plans to
the page."""

import re
from pathlib import Path

import pytest

from lightning_distrec.sharding.planning.traffic import (
    IDS,
    REPLICATED_GRADIENTS,
    ROW_GRADIENTS,
    ROWS,
    estimate_traffic,
)
from lightning_distrec.sharding.sharding_groups import NodeLayout
from tests.benchmarks.scale import write
from tests.benchmarks.scale_checkpoints import read_checkpoints
from tests.benchmarks.scale_formulas import FORMULAS, Grouped, Numbers, most_ids_for_links
from tests.benchmarks.scale_points import load
from tests.benchmarks.scale_text import page as page_of
from tests.support.planned import planned

SIZES = 3 * 8
"""Numbers of lengths and of ids, and the batch's size: for each pair of ranks, whatever the
table."""


@pytest.mark.parametrize("kind", FORMULAS)
@pytest.mark.parametrize(("num_ranks", "on_node"), [(4, 4), (4, 2), (12, 4), (16, 2)])
def test_formulas_are_the_mean_over_ranks_of_what_is_estimated(
    kind: str, num_ranks: int, on_node: int
) -> None:
    rows, dim, batch, ids = 48, 8, 10, 3.0
    layout = NodeLayout.equal(num_ranks, on_node)
    update = "dense" if kind == "data_parallel" else "fused"
    table = planned(
        sharding_type=kind,
        layout=layout,
        num_rows=rows,
        dim=dim,
        pooling_factors=(ids,),
        update=update,
    )
    traffic = estimate_traffic([table], layout, batch)
    numbers, formula = (
        Numbers(R=num_ranks, L=on_node, B=batch, D=dim, p=ids, H=rows),
        FORMULAS[kind],
    )
    sizes, sizes_across = (
        (0, 0)
        if kind == "data_parallel"
        else (SIZES * (num_ranks - 1), SIZES * (num_ranks - on_node))
    )
    back = REPLICATED_GRADIENTS if kind == "data_parallel" else ROW_GRADIENTS
    assert traffic.sent(IDS).mean() == pytest.approx(numbers.of(formula.ids) + sizes)
    assert traffic.sent(back).mean() == pytest.approx(numbers.of(formula.rows))
    assert traffic.sent().mean() == pytest.approx(numbers.sent(kind) + sizes)
    assert traffic.across_nodes().mean() == pytest.approx(numbers.sent_across(kind) + sizes_across)
    if num_ranks > on_node:
        assert traffic.across_nodes(IDS).mean() == pytest.approx(
            numbers.of(formula.ids_across) + sizes_across
        )
        assert traffic.across_nodes(back).mean() == pytest.approx(numbers.of(formula.rows_across))
    if kind != "data_parallel":
        assert traffic.sent(ROWS).mean() == pytest.approx(traffic.sent(back).mean())


def test_links_decide_up_to_as_many_ids_as_make_both_take_equally_long() -> None:
    ids = most_ids_for_links(64, 8, 128)
    num_bytes = 4 * (1 + ids) + 8 * 128
    away = 56 / 64 * num_bytes / (12.5 * 2**30)
    near = 7 / 64 * num_bytes / (600 * 2**30) + 12 * ids * 128 / (897 * 2**30)
    assert away == pytest.approx(near)
    assert most_ids_for_links(8, 8, 128) == 0  # one node has no such links


def test_groups_pay_from_the_step_on_that_makes_both_take_equally_long() -> None:
    groups = Grouped(num_ranks=4096, group=512)
    assert (groups.copies, groups.bytes_per_rank) == (8, 10e12 / 512)
    grouped = groups.exchange_seconds(True) + groups.average_seconds / groups.least_steps
    assert grouped == pytest.approx(groups.exchange_seconds(False))
    # leaves the node
    assert Grouped(num_ranks=8192, group=512).average_seconds > 40 * groups.average_seconds
    assert Grouped(num_ranks=512, group=512).least_steps == float("inf")


def test_what_crosses_no_node_any_more_is_the_difference_of_two_exchanges() -> None:
    groups = Grouped(num_ranks=64, group=16)
    one_table = groups.num_tables * (Numbers(R=64, L=8).sent_across("table_wise"))
    group_values = groups.num_tables * (Numbers(R=16, L=8).sent_across("table_wise"))
    assert groups.saved_byte_seconds == pytest.approx((one_table - group_values) / (12.5 * 2**30))


@pytest.mark.slow
def test_a_small_run_writes_the_page_and_its_pictures_and_redraws_them(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path, redraw=False, quick=True)
    page = (tmp_path / "scale.md").read_text(encoding="utf-8")
    pictures = sorted(path.name for path in (tmp_path / "images").glob("*.png"))
    assert sorted(set(re.findall(r"\(images/(\w+\.png)\)", page))) == pictures
    for formula in FORMULAS.values():
        assert f"`{formula.rows}`" in page
    points = load(tmp_path / "images" / "scale.json")
    assert [p.job.num_ranks for p in points.ranks] == [8, 16]
    assert (
        points.rows[1].planned.facts["row_bytes"] == 3 * points.rows[0].planned.facts["row_bytes"]
    )
    assert not any(points.ranks[0].planned.facts["across"].values())
    write(tmp_path, redraw=True, quick=False)
    assert (tmp_path / "scale.md").read_text(encoding="utf-8") == page


def test_the_page_shows_its_numbers_in_words() -> None:
    docs = Path(__file__).resolve().parents[3] / "docs"
    points = load(docs / "images" / "scale.json")
    measured = read_checkpoints((docs / "performance.md").read_text(encoding="utf-8"))
    assert (docs / "scale.md").read_text(encoding="utf-8") == page_of(points, measured)


def test_a_page_without_measured_checkpoints_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"no measured save: run python -m tests.benchmarks.checkpointing --write"
    ):
        read_checkpoints("# How fast\n")
