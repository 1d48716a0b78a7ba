"""How many different ids a batch has, and whether each is to be sent once."""

import numpy as np
import pytest

from lightning_distrec.sharding.planning.costs import (
    MAX_DISTINCT_SHARE,
    MIN_IDS,
    estimate_batch_ids,
)


@pytest.mark.parametrize(("number", "rows"), [(3_000, 1_000), (5_000, 20_000), (2_500, 1)])
def test_ids_that_were_not_counted_are_spread_evenly(number: int, rows: int) -> None:
    drawn = np.random.default_rng(0).integers(0, rows, size=(20, number))
    distinct = np.mean([len(np.unique(ids)) for ids in drawn])
    assert estimate_batch_ids([number], rows, None).distinct_share == pytest.approx(
        distinct / number, rel=0.02
    )


@pytest.mark.parametrize(
    ("number", "share", "once"),
    [
        (MIN_IDS, MAX_DISTINCT_SHARE, True),
        (MIN_IDS - 1, MAX_DISTINCT_SHARE, False),
        (MIN_IDS, MAX_DISTINCT_SHARE + 0.01, False),
    ],
)
def test_few_ids_and_ids_that_hardly_repeat_are_sent_each_time(
    number: int, share: float, once: bool
) -> None:
    assert estimate_batch_ids([number], 10**9, share).repeat_enough is once
