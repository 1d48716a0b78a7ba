"""The benchmark of plans, where it is plain functions: which plans are timed, its numbers, its
place in the page."""

from dataclasses import replace

import numpy as np
import pytest

from lightning_distrec.sharding.planning.plan_file import load_plan, plan_text, save_plan
from lightning_distrec.sharding.planning.sharding_plan import ShardingPlan
from lightning_distrec.sharding.sharding_groups import NodeLayout
from tests.benchmarks.performance_text import GPU
from tests.benchmarks.plan_quality_plans import Space, default_bandwidths, renamed_ranks, sampled
from tests.benchmarks.plan_quality_text import (
    BEGIN,
    END,
    missed,
    over_best,
    plans_table,
    rank_correlation,
    section,
    with_section,
)
from tests.benchmarks.plan_quality_turns import (
    OURS,
    OURS_DEFAULT,
    TORCHRECS,
    TORCHRECS_DEFAULT,
    Job,
    Measured,
    Tried,
)

PLACES = NodeLayout.from_node_sizes(2, 2)


@pytest.fixture(scope="module")
def space() -> Space:
    return Space(PLACES)


def with_names(plan: ShardingPlan, names: tuple[int, ...]) -> ShardingPlan:
    """Return the plan with its ranks numbered anew."""
    tables = {
        name: replace(
            table, shards=tuple(shard._replace(rank=names[shard.rank]) for shard in table.shards)
        )
        for name, table in plan.tables.items()
    }
    return replace(plan, tables=tables)


def test_plans_that_differ_by_the_numbers_of_alike_ranks_have_one_key_and_others_have_not(
    space: Space,
) -> None:
    draw = np.random.default_rng(0)
    plans = [space.drawn(draw) for _ in range(40)]
    assert len({space.key(plan) for plan in plans}) > 30
    assert len(set(renamed_ranks(PLACES))) == 8
    for plan in plans:
        assert {space.key(with_names(plan, names)) for names in renamed_ranks(PLACES)} == {
            space.key(plan)
        }
    split = with_names(space.torchrecs(default_bandwidths()), (0, 2, 1, 3))
    assert space.key(split) != space.key(with_names(split, (0, 2, 1, 3)))


def test_equal_ranks_renamed_cost_the_same(space: Space) -> None:
    plan = space.drawn(np.random.default_rng(4))
    costs = {
        round(space.estimate(with_names(plan, n), default_bandwidths()), 9)
        for n in renamed_ranks(PLACES)
    }
    assert len(costs) == 1


def test_a_sample_holds_the_named_plans_and_unlike_others_that_files_can_hold(
    space: Space, tmp_path
) -> None:  # type: ignore[no-untyped-def]
    named = {"ours": space.torchrecs(default_bandwidths())} | space.of_one_type(
        default_bandwidths()
    )
    plans = sampled(space, named, "ours", 20, seed=0)
    assert len(plans) == 20
    assert list(plans)[: len(named)] == list(named)
    assert plans == sampled(space, named, "ours", 20, seed=0)
    assert plans != sampled(space, named, "ours", 20, seed=1)
    remaining = [plan for name, plan in plans.items() if name not in named]
    assert len({space.key(plan) for plan in remaining}) == len(remaining)
    for number, (name, plan) in enumerate(plans.items()):
        save_plan(tmp_path / f"{number}.json", plan)
        assert plan_text(load_plan(tmp_path / f"{number}.json")) == plan_text(plan)
        changed = sum(table != named["ours"].tables[entry] for entry, table in plan.tables.items())
        assert changed == 1 or not name.startswith("near")


def test_ranks_of_lists_agree_disagree_or_say_nothing() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 300, 4000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) == 0
    # Ranks less their mean are -1.5, 0, 0, 1.5 and -1.5, -0.5, 1.5, 0.5: products add up to 3,
    # squares to 4.5 and 5.
    assert rank_correlation([1, 2, 2, 3], [5, 6, 9, 8]) == pytest.approx(3 / 22.5**0.5)


def measured(space: Space, distrec: float) -> Measured:
    plan = space.drawn(np.random.default_rng(0))
    tried = {
        OURS: Tried(plan, 1.0, 1.0, [[distrec, distrec, 99.0], [distrec, distrec, 99.0]]),
        TORCHRECS: Tried(plan, 3.0, 2.0, [[20.0, 20.0, 99.0], [20.0]]),
        "drawn 2": Tried(plan, 2.0, 3.0, [[10.0]]),
    }
    is_equal = {
        OURS: OURS,
        OURS_DEFAULT: TORCHRECS,
        TORCHRECS: TORCHRECS,
        TORCHRECS_DEFAULT: TORCHRECS,
    }
    return Measured(tried, is_equal, 12_345, default_bandwidths())


def test_our_plan_is_compared_with_the_best_and_bold_where_it_misses_the_aim(space: Space) -> None:
    good, bad = measured(space, 10.5), measured(space, 15.5)
    assert over_best(good, OURS) == pytest.approx(1.05)
    assert over_best(good, OURS_DEFAULT) == over_best(good, TORCHRECS) == pytest.approx(2.0)
    assert missed({(2, 200): good, (4, 200): bad}) == 1
    lines = plans_table({(2, 200): good, (4, 800): bad}).splitlines()[2:]
    assert lines[0].startswith(
        "| 200 | 2 | 3 of 12,345 | 10.0 | 1.00 | 2.00 | 1.050 | 2.000 | 2.000 | 2.000 |"
    )
    assert "| **1.550** |" in lines[1]


def test_the_section_comes_before_the_one_about_gpus_and_replaces_the_one_that_is_there(
    space: Space,
) -> None:
    text = section(
        {(2, 200): measured(space, 10.0)},
        ["- note"],
        Job(PLACES),
        machine="2 cores",
        when="on a day",
    )
    page = with_section(f"# How fast\n\nwords\n\n{GPU}\n", text)
    assert (
        page.index("words")
        < page.index(BEGIN)
        < page.index("- note")
        < page.index(END)
        < page.index("## On a GPU")
    )
    assert with_section(page, text.replace("on a day", "later")) == page.replace(
        "on a day", "later"
    )
    assert with_section("# How fast\n", text).endswith(f"{END}\n")
