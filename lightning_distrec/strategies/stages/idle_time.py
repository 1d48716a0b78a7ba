"""How long ranks of a pipeline idle: a schedule is replayed with the times of its stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_distrec._compat.torch_distributed import Action, pipeline_order
from lightning_distrec.strategies.estimates.block_profile import ChainTimes
from lightning_distrec.strategies.stages.chain import Schedule

HOST_SECONDS = 0.0003
"""What a rank on a CPU spends between two actions: torch's schedule, and a send and a receive by gloo. Measured by the
gaps in pictures of StageSchedule, 0.1 to 0.5 ms. A GPU computes on meanwhile."""


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of one micro-batch."""

    forward: list[float]
    """Of each stage; the last one's with the loss where that is computed for each micro-batch."""
    backward: list[float]
    loss: float = 0.0
    """What the last stage computes between the last forward and the first backward."""

    @classmethod
    def equal(cls, num_stages: int) -> "StageTimes":
        """Return the times of stages that all take the same."""
        return cls(forward=[1.0] * num_stages, backward=[1.0] * num_stages)


def stage_times(times: ChainTimes, begins: Sequence[int], num: int, schedule: Schedule) -> StageTimes:
    """Return the times of `num` micro-batches in stages that begin at these blocks."""
    ends = (*begins[1:], len(times.forward))
    forward = [sum(times.forward[begin:end]) / num for begin, end in zip(begins, ends, strict=True)]
    backward = [sum(times.backward[begin:end]) / num for begin, end in zip(begins, ends, strict=True)]
    # The last stage runs the step from its beginning, with the chain's output in it.
    around = times.head + times.tail
    if schedule == "gpipe":
        return StageTimes(forward=forward, backward=backward, loss=around + times.tail_backward)
    forward[-1] += around / num
    backward[-1] += times.tail_backward / num
    return StageTimes(forward=forward, backward=backward)


def idle_share(times: StageTimes, num_ranks: int, num: int, schedule: Schedule, host_seconds: float = 0.0) -> float:
    """Return the share of the ranks' time, from the first work to the last, in which they have none.

    host_seconds: what passes before each action. Other than that, sends take no time here.
    """
    num_stages = len(times.forward)
    pending = order_actions(schedule, num_ranks, num_stages, num)
    ended: dict[Action, float] = {}
    free = [0.0] * num_ranks
    # Each pass replays every action whose input is there. A schedule that torch runs has one in each pass.
    while any(pending):
        for rank, actions in enumerate(pending):
            while actions and (ready := _ready_time(actions[0], ended, num_stages, num, times.loss)) is not None:
                kind, stage, _ = actions[0]
                seconds = (times.forward if kind == "forward" else times.backward)[stage]
                free[rank] = ended[actions.pop(0)] = max(free[rank], ready) + host_seconds + seconds
    busy = num * (sum(times.forward) + sum(times.backward)) + times.loss
    return 1.0 - busy / (num_ranks * max(free)) if max(free) else 0.0


def _ready_time(action: Action, ended: dict[Action, float], num_stages: int, num: int, loss: float) -> float | None:
    """Return when an action's input is there; None: the action that computes it has not been replayed yet."""
    kind, stage, microbatch = action
    if kind == "forward":
        return ended.get(("forward", stage - 1, microbatch)) if stage else 0.0
    if stage < num_stages - 1:
        return ended.get(("backward", stage + 1, microbatch))
    # A loss of the whole batch waits for the last micro-batch's forward, one of a micro-batch for its own.
    end = ended.get(("forward", stage, num - 1 if loss else microbatch))
    return None if end is None else end + loss


def order_actions(schedule: Schedule, num_ranks: int, num_stages: int, num: int) -> list[list[Action]]:
    """Return what each rank computes, in order, as `StagedChain` does: 1F1B needs a micro-batch for each stage."""
    return pipeline_order("gpipe" if num < num_stages and schedule == "1f1b" else schedule, num_ranks, num_stages, num)


def peak_activation_bytes(actions: list[Action], bytes_by_stage: Mapping[int, float]) -> float:
    """Return the most bytes at once that a rank's forwards keep for their backwards.

    bytes_by_stage: what a stage's forwards of all micro-batches keep.
    """
    num = 1 + max(part for _, _, part in actions)
    held = largest = 0.0
    for kind, stage, _ in actions:
        held += bytes_by_stage[stage] / num if kind == "forward" else -bytes_by_stage[stage] / num
        largest = max(largest, held)
    return largest
