"""The order of work that torch's schedules return is the one that they run."""

from typing import Any

import pytest

from lightning_distrec._compat import torch_distributed

F, B = "forward", "backward"
TWO_MICROBATCHES = {
    "gpipe": [[(F, 0, 0), (F, 0, 1), (B, 0, 0), (B, 0, 1)], [(F, 1, 0), (F, 1, 1), (B, 1, 0), (B, 1, 1)]],
    "1f1b": [[(F, 0, 0), (F, 0, 1), (B, 0, 0), (B, 0, 1)], [(F, 1, 0), (B, 1, 0), (F, 1, 1), (B, 1, 1)]],
}
SIZES = [("gpipe", 3, 3, 5), ("1f1b", 4, 4, 8), ("1f1b", 3, 3, 3), ("interleaved_1f1b", 2, 4, 4)]
SIZES += [("interleaved_1f1b", 4, 12, 8), ("interleaved_1f1b", 2, 4, 3)]


@pytest.mark.parametrize("schedule", TWO_MICROBATCHES)
def test_pipeline_order_of_two_stages(schedule: str) -> None:
    assert torch_distributed.pipeline_order(schedule, 2, 2, 2) == TWO_MICROBATCHES[schedule]


def test_pipeline_order_of_two_stages_on_a_rank() -> None:
    last = torch_distributed.pipeline_order("interleaved_1f1b", 2, 4, 2)[1]
    assert last == [(F, 1, 0), (F, 1, 1), (F, 3, 0), (B, 3, 0), (F, 3, 1), (B, 3, 1), (B, 1, 0), (B, 1, 1)]


@pytest.mark.parametrize(("schedule", "num_ranks", "num_stages", "num"), SIZES)
def test_pipeline_order_has_every_micro_batch_of_every_stage_once(
    schedule: str, num_ranks: int, num_stages: int, num: int
) -> None:
    for rank, actions in enumerate(torch_distributed.pipeline_order(schedule, num_ranks, num_stages, num)):
        expected: set[Any] = {(k, s, m) for k in (F, B) for s in range(rank, num_stages, num_ranks) for m in range(num)}
        assert set(actions) == expected
        assert len(actions) == len(expected)
