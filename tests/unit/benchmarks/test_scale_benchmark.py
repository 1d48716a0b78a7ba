"""The formulas of docs/scale.md, against what is estimated for plans."""

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
from tests.support.planned import planned

PAGE = Path(__file__).resolve().parents[3] / "docs" / "scale.md"
KINDS = ("table_wise", "row_wise", "table_row_wise", "data_parallel")
BYTES_OF_SIZES = 3 * 8
"""Numbers of lengths and of ids, and the batch's size: for each pair of ranks, whatever the
table."""


def formulas(kind: str) -> list[str]:
    """Return the page's expressions: ids, rows one way, and those of each that leave a node."""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        if cells[0] == kind and len(cells) == 5:
            return cells[1:]
    raise AssertionError(f"{PAGE} has no formulas of {kind}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_ranks", "on_node"), [(4, 4), (4, 2), (12, 4), (16, 2)])
def test_formulas_are_the_mean_over_ranks_of_what_is_estimated(
    kind: str, num_ranks: int, on_node: int
) -> None:
    letters = {"R": num_ranks, "L": on_node, "N": num_ranks / on_node}
    letters |= {"B": 10, "D": 8, "p": 3.0, "H": 48}
    values = [eval(expression, {"__builtins__": {}}, letters) for expression in formulas(kind)]
    ids, rows, ids_across, rows_across = values
    is_replicated = kind == "data_parallel"
    layout = NodeLayout.equal(num_ranks, on_node)
    table = planned(
        sharding_type=kind,
        layout=layout,
        num_rows=48,
        dim=8,
        pooling_factors=(3.0,),
        update="dense" if is_replicated else "fused",
    )
    traffic = estimate_traffic([table], layout, 10)
    sizes = 0 if is_replicated else BYTES_OF_SIZES * (num_ranks - 1)
    sizes_across = 0 if is_replicated else BYTES_OF_SIZES * (num_ranks - on_node)
    gradients = REPLICATED_GRADIENTS if is_replicated else ROW_GRADIENTS
    assert traffic.sent(IDS).mean() == pytest.approx(ids + sizes)
    assert traffic.sent(gradients).mean() == pytest.approx(rows)
    if num_ranks > on_node:
        assert traffic.across_nodes(IDS).mean() == pytest.approx(ids_across + sizes_across)
        assert traffic.across_nodes(gradients).mean() == pytest.approx(rows_across)
    if not is_replicated:
        assert traffic.sent(ROWS).mean() == pytest.approx(rows)
