"""What a pipeline keeps for backward, and how long its ranks idle, is that of a replay of torch's
own schedules."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from lightning_distrec.strategies.stages.chain import StageOptions

SIZES = [("gpipe", 3, 1, 5), ("1f1b", 4, 1, 8), ("1f1b", 3, 1, 3), ("interleaved_1f1b", 2, 2, 4)]
SIZES += [("interleaved_1f1b", 4, 3, 8)]


def _order(schedule: str, num_ranks: int, stages_per_rank: int, num_parts: int) -> list[list[Any]]:
    """Return what each rank computes, in order; None where it waits. Source: torch's schedules,
    which read numbers."""
    numbers: Any = SimpleNamespace(
        _n_microbatches=num_parts,
        _num_stages=num_ranks * stages_per_rank,
        pp_group_size=num_ranks,
        n_local_stages=stages_per_rank,
        microbatches_per_round=num_parts // max(1, num_parts // num_ranks),
    )
    if schedule == "interleaved_1f1b":
        calculate = ScheduleInterleaved1F1B._calculate_single_rank_operations
        return [calculate(numbers, rank) for rank in range(num_ranks)]
    kind: Any = ScheduleGPipe if schedule == "gpipe" else Schedule1F1B
    order = kind._get_pipeline_order(numbers)
    return [order[rank] for rank in range(num_ranks)]


@pytest.mark.parametrize(("schedule", "num_ranks", "stages_per_rank", "num_parts"), SIZES)
def test_ranks_keep_as_many_forwards_as_torchs_schedules(
    schedule: Any, num_ranks: int, stages_per_rank: int, num_parts: int
) -> None:
    options = StageOptions(
        schedule=schedule, stages_per_rank=stages_per_rank, microbatches=num_parts
    )
    for rank, operations in enumerate(_order(schedule, num_ranks, stages_per_rank, num_parts)):
        held = most = 0
        for operation in filter(None, operations):
            held += {"FORWARD": 1, "FULL_BACKWARD": -1}.get(operation.computation_type.name, 0)
            most = max(most, held)
        assert options.forwards_in_flight(rank, num_ranks, num_parts) == most


def test_equal_stages_idle_as_the_formula_says() -> None:
    assert StageOptions(microbatches=4).idle_share(4, 4) == pytest.approx(3 / 7)
    interleaved = StageOptions(schedule="interleaved_1f1b", stages_per_rank=2, microbatches=8)
    assert interleaved.idle_share(2, 8) == pytest.approx(1 / 17)


def test_1f1b_of_few_micro_batches_keeps_all_forwards() -> None:
    assert StageOptions(schedule="1f1b").forwards_in_flight(0, 4, 2) == 2
