"""No stage of a large table's life takes a rank more than its share, but those that must hold the whole table."""

from pathlib import Path

import pytest

from tests.benchmarks.life_memory import COPIES, WHOLE, Life, exceeds, measure


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_table_of_a_gigabyte_lives_within_the_share_of_each_rank(tmp_path: Path) -> None:
    rows = measure(Life(gib=1.0), tmp_path)
    peaks = {row["stage"]: max(row["peaks"]) for row in rows}
    print({stage: peak // 2**20 for stage, peak in peaks.items()})
    # A fit on shards of an earlier one holds both sets of them.
    assert [row["stage"] for row in rows if exceeds(row)] == ["second fit"]
    for stage in (*WHOLE, COPIES):
        assert peaks[stage] > next(row["needed"] for row in rows if row["stage"] == stage), "it measures nothing"
