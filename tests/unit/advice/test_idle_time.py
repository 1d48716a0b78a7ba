"""The replay of torch's schedules has the idle time of the formula where stages are equal."""

from typing import Any

import pytest

from lightning_distrec.strategies.estimates.idle_time import (
    ChainTimes,
    StageTimes,
    idle_share,
    order_actions,
    peak_activation_bytes,
    stage_times,
)

SIZES = [("gpipe", 3, 3, 5), ("1f1b", 4, 4, 8), ("1f1b", 3, 3, 3), ("interleaved_1f1b", 2, 4, 4)]
SIZES += [("interleaved_1f1b", 4, 12, 8)]


@pytest.mark.parametrize(("schedule", "num_ranks", "num_stages", "num"), SIZES)
def test_equal_stages_idle_as_the_formula_says(schedule: Any, num_ranks: int, num_stages: int, num: int) -> None:
    """Narayanan et al. 2021, section 2.2: idle to useful time is (ranks - 1) / (stages per rank * micro-batches)."""
    ideal = (num_ranks - 1) / (num_stages // num_ranks * num + num_ranks - 1)
    times = StageTimes(forward=[1.0] * num_stages, backward=[2.0] * num_stages)
    assert idle_share(times, num_ranks, num, schedule) == pytest.approx(ideal)
    assert idle_share(StageTimes.equal(num_stages), num_ranks, num, schedule) == pytest.approx(ideal)


def test_a_loss_of_the_whole_batch_lets_the_other_rank_wait() -> None:
    chain = ChainTimes(forward=[4.0, 4.0], backward=[8.0, 8.0], head=1.0, tail=2.0, tail_backward=3.0)
    times = stage_times(chain, (0, 1), 4, "gpipe")
    assert (times.forward, times.backward, times.loss) == ([1.0, 1.0], [2.0, 2.0], 6.0)
    assert idle_share(times, 2, 4, "gpipe") == pytest.approx(1 - (24 + 6) / (2 * (15 + 6)))
    microbatch_times = stage_times(chain, (0, 1), 4, "1f1b")
    assert microbatch_times == StageTimes(forward=[1.0, 1.75], backward=[2.0, 2.75])
    assert idle_share(times, 2, 4, "gpipe", host_seconds=0.5) > idle_share(times, 2, 4, "gpipe")


def test_1f1b_keeps_less_than_all_forwards() -> None:
    stage_bytes = {0: 80.0, 1: 80.0}
    for schedule, rank, most in (("gpipe", 0, 80), ("1f1b", 0, 20), ("1f1b", 1, 10)):
        actions = order_actions(schedule, 2, 2, 8)[rank]  # type: ignore[arg-type]
        assert peak_activation_bytes(actions, stage_bytes) == pytest.approx(most)


def test_1f1b_of_few_micro_batches_is_computed_as_gpipe() -> None:
    assert order_actions("1f1b", 4, 4, 2) == order_actions("gpipe", 4, 4, 2)
