"""Batches whose features come in another order, or of which one is missing, train as without
look-ahead."""

import pytest

from tests.support import reordered_models as models
from tests.support.ranks import run_each_on_ranks

REORDERED = {
    models.InKjt: (8, 7),
    models.ByNames: (8, 4),
    models.TableOfName: (24, 12),
    models.TableOfKey: (24, 12),
    models.InDict: None,
    models.InList: None,
    models.InDictOfKjts: None,
}
"""Models, and of how many lookups how many are sent ahead where that does not depend on what the
step computes."""


def test_features_in_another_order_are_looked_up_as_the_step_calls() -> None:
    per_rank_results = run_each_on_ranks(
        {kind.__name__: (models.fit_at_both_depths, kind, models.ORDERS) for kind in REORDERED}, 2
    )
    for rank_result in per_rank_results:
        for kind, count in REORDERED.items():
            (plain, _, failed), (ahead, counted, failed_too) = rank_result[kind.__name__]
            assert (failed, failed_too) == ("", ""), kind
            assert len(plain) == len(models.ORDERS), kind
            assert ahead == plain, kind
            assert count is None or counted == count, (kind, counted)


@pytest.mark.parametrize("kind", [models.InKjt, models.ByNames, models.InDict])
def test_a_missing_feature_is_named_as_without_look_ahead(kind: type[models.Reordered]) -> None:
    for rank_result in run_each_on_ranks(
        {"one": (models.fit_at_both_depths, kind, models.MISSING)}, 2
    ):
        (plain, _, failed), (ahead, _, failed_too) = rank_result["one"]
        assert "needs the features ['h'], but was called with ['f', 'g']" in failed
        assert failed_too == failed
        assert ahead == plain
        assert len(plain) == models.MISSING.index("fg")
