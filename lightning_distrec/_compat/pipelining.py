"""Private names of torch.distributed.pipelining: the order of a schedule's work."""

from types import SimpleNamespace
from typing import Any, Literal

from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import _ComputationType

Action = tuple[Literal["forward", "backward"], int, int]
"""What is computed, the stage, and the micro-batch."""

_KINDS: dict[Any, Literal["forward", "backward"]] = {
    _ComputationType.FORWARD: "forward",
    _ComputationType.FULL_BACKWARD: "backward",
}


def pipeline_order(schedule: str, num_ranks: int, num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """Return what each rank computes, in order. schedule: "gpipe", "1f1b" or "interleaved_1f1b".

    A schedule object needs stages, and these a process group. The methods that return its order read numbers alone,
    so that they are called with these. The order that torch returns for 1F1B, and does not run, counts the last
    stage's forwards from 1. Source: torch/distributed/pipelining/schedules.py.
    """
    numbers: Any = SimpleNamespace(
        _n_microbatches=num_microbatches,
        _num_stages=num_stages,
        pp_group_size=num_ranks,
        n_local_stages=num_stages // num_ranks,
        microbatches_per_round=num_microbatches // max(1, num_microbatches // num_ranks),
    )
    if schedule == "interleaved_1f1b":
        calculate = ScheduleInterleaved1F1B._calculate_single_rank_operations
        order = {rank: calculate(numbers, rank) for rank in range(num_ranks)}
    else:
        kind: Any = ScheduleGPipe if schedule == "gpipe" else Schedule1F1B
        order = kind._get_pipeline_order(numbers)
    return [_counted_from_zero(order[rank]) for rank in range(num_ranks)]


def _counted_from_zero(operations: list[Any]) -> list[Action]:
    computed = [each for each in operations if each is not None and each.computation_type in _KINDS]
    first = min(each.microbatch_index for each in computed if each.computation_type == _ComputationType.FORWARD)
    actions: list[Action] = []
    for operation in computed:
        kind = _KINDS[operation.computation_type]
        number = operation.microbatch_index - (first if kind == "forward" else 0)
        actions.append((kind, operation.stage_index, number))
    return actions
