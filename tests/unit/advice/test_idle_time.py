"""The replay of a schedule has torch's order of work, and the idle time of the formula where stages are equal."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _ComputationType

from lightning_distrec.advice.idle_time import StageTimes, actions_of, idle_share, max_kept, times_of_stages
from lightning_distrec.callbacks.stage_schedule import ideal_bubble
from lightning_distrec.strategies.estimates.timed_blocks import ChainTimes

SIZES = [("gpipe", 3, 3, 5), ("1f1b", 4, 4, 8), ("1f1b", 3, 3, 3), ("interleaved_1f1b", 2, 4, 4)]
SIZES += [("interleaved_1f1b", 4, 12, 8), ("interleaved_1f1b", 2, 4, 3)]


def of_torch(schedule: str, rank: int, num_ranks: int, num_stages: int, num: int) -> list[tuple[str, int, int]]:
    """Return torch's own order."""
    made: Any = SimpleNamespace(_n_microbatches=num, _num_stages=num_stages, pp_group_size=num_ranks, rank=rank)
    made.n_local_stages, made.microbatches_per_round = num_stages // num_ranks, num // max(1, num // num_ranks)
    if schedule == "interleaved_1f1b":
        actions = ScheduleInterleaved1F1B._calculate_single_rank_operations(made, rank)
    else:
        kind: Any = ScheduleGPipe if schedule == "gpipe" else Schedule1F1B
        actions = kind._get_pipeline_order(made)[rank]
    names = {_ComputationType.FORWARD: "forward", _ComputationType.FULL_BACKWARD: "backward"}
    found = [each for each in actions if each is not None and each.computation_type in names]
    # What torch draws of 1F1B, and does not run, counts the last stage's forwards from 1.
    first = min(each.microbatch_index for each in found if each.computation_type == _ComputationType.FORWARD)
    return [
        (name := names[each.computation_type], each.stage_index, each.microbatch_index - first * (name == "forward"))
        for each in found
    ]


@pytest.mark.parametrize(("schedule", "num_ranks", "num_stages", "num"), SIZES)
def test_the_order_is_that_of_torch(schedule: Any, num_ranks: int, num_stages: int, num: int) -> None:
    for rank in range(num_ranks):
        ours = actions_of(schedule, rank, num_ranks, num_stages, num)
        assert ours == of_torch(schedule, rank, num_ranks, num_stages, num)
        assert len(set(ours)) == 2 * num * num_stages // num_ranks


@pytest.mark.parametrize(("schedule", "num_ranks", "num_stages", "num"), SIZES[:-1])
def test_equal_stages_idle_as_the_formula_says(schedule: Any, num_ranks: int, num_stages: int, num: int) -> None:
    times = StageTimes(forward=[1.0] * num_stages, backward=[2.0] * num_stages, loss=0.0)
    assert idle_share(times, num_ranks, num, schedule) == pytest.approx(ideal_bubble(num_ranks, num_stages, num))


def test_a_loss_of_the_whole_batch_lets_the_other_rank_wait() -> None:
    chain = ChainTimes(forward=[4.0, 4.0], backward=[8.0, 8.0], before=1.0, after=2.0, after_backward=3.0)
    times = times_of_stages(chain, (0, 1), 4, "gpipe")
    assert (times.forward, times.backward, times.loss) == ([1.0, 1.0], [2.0, 2.0], 6.0)
    assert idle_share(times, 2, 4, "gpipe") == pytest.approx(1 - (24 + 6) / (2 * (15 + 6)))
    by_part = times_of_stages(chain, (0, 1), 4, "1f1b")
    assert (by_part.forward, by_part.backward, by_part.loss) == ([1.0, 1.75], [2.0, 2.75], 0.0)
    assert idle_share(times, 2, 4, "gpipe", host_seconds=0.5) > idle_share(times, 2, 4, "gpipe")


def test_1f1b_keeps_less_than_all_forwards() -> None:
    of_stage = {0: 80.0, 1: 80.0}
    for schedule, rank, most in (("gpipe", 0, 80), ("1f1b", 0, 20), ("1f1b", 1, 10)):
        actions = actions_of(schedule, rank, 2, 2, 8)  # type: ignore[arg-type]
        assert max_kept(actions, of_stage) == pytest.approx(most)
