"""What docs/scale.md says on paper, against what is reckoned for plans; and the way from plans to the page."""

from pathlib import Path

import pytest

from lightning_distrec.sharding.topology import Places
from lightning_distrec.sharding.traffic import IDS, ROW_GRADIENTS, ROWS, WHOLE_GRADIENTS, estimate_traffic
from tests.benchmarks.scale_formulas import FORMULAS, Grouped, Numbers, most_ids_for_links
from tests.support.planned import planned

SIZES = 3 * 8
"""Numbers of lengths and of ids, and the batch's size: for each pair of ranks, whatever the table."""


@pytest.mark.parametrize("cut", FORMULAS)
@pytest.mark.parametrize(("num_ranks", "on_node"), [(4, 4), (4, 2), (12, 4), (16, 2)])
def test_formulas_are_the_mean_over_ranks_of_what_is_reckoned(cut: str, num_ranks: int, on_node: int) -> None:
    rows, dim, batch, ids = 48, 8, 10, 3.0
    places = Places.equal(num_ranks, on_node)
    update = "dense" if cut == "data_parallel" else "fused"
    table = planned(cut=cut, places=places, num_rows=rows, dim=dim, pooling_factors=(ids,), update=update)
    traffic = estimate_traffic([table], places, batch)
    numbers, formula = Numbers(R=num_ranks, L=on_node, B=batch, D=dim, p=ids, H=rows), FORMULAS[cut]
    sizes, sizes_across = (0, 0) if cut == "data_parallel" else (SIZES * (num_ranks - 1), SIZES * (num_ranks - on_node))
    back = WHOLE_GRADIENTS if cut == "data_parallel" else ROW_GRADIENTS
    assert traffic.sent(IDS).mean() == pytest.approx(numbers.of(formula.ids) + sizes)
    assert traffic.sent(back).mean() == pytest.approx(numbers.of(formula.rows))
    assert traffic.sent().mean() == pytest.approx(numbers.sent(cut) + sizes)
    assert traffic.across_nodes().mean() == pytest.approx(numbers.sent_across(cut) + sizes_across)
    if num_ranks > on_node:
        assert traffic.across_nodes(IDS).mean() == pytest.approx(numbers.of(formula.ids_across) + sizes_across)
        assert traffic.across_nodes(back).mean() == pytest.approx(numbers.of(formula.rows_across))
    if cut != "data_parallel":
        assert traffic.sent(ROWS).mean() == pytest.approx(traffic.sent(back).mean())
