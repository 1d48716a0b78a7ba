"""How long ranks of a pipeline idle: a schedule is replayed with the times of its stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_distrec.strategies.estimates.timed_blocks import ChainTimes
from lightning_distrec.strategies.stages.stage_options import Schedule

Action = tuple[Literal["forward", "backward"], int, int]
"""What is computed, the stage, and the micro-batch."""
HOST_SECONDS = 0.0003
"""What a rank on a CPU spends between two actions: torch's schedule, and a send and a receive by gloo. Measured by the
gaps in pictures of StageSchedule, 0.1 to 0.5 ms. A GPU computes on meanwhile."""


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of one micro-batch."""

    forward: list[float]
    """Of each stage; the last one's with the loss where that is computed for each micro-batch."""
    backward: list[float]
    loss: float
    """What the last stage computes between the last forward and the first backward."""


def times_of_stages(times: ChainTimes, begins: Sequence[int], num: int, schedule: Schedule) -> StageTimes:
    """Return the times of `num` micro-batches in stages that begin at these blocks."""
    ends = (*begins[1:], len(times.forward))
    forward = [sum(times.forward[begin:end]) / num for begin, end in zip(begins, ends, strict=True)]
    backward = [sum(times.backward[begin:end]) / num for begin, end in zip(begins, ends, strict=True)]
    again = times.before + times.after  # the last stage runs the step from its beginning, with the chain's output in it
    if schedule == "gpipe":
        return StageTimes(forward=forward, backward=backward, loss=again + times.after_backward)
    forward[-1] += again / num
    backward[-1] += times.after_backward / num
    return StageTimes(forward=forward, backward=backward, loss=0.0)


def idle_share(times: StageTimes, num_ranks: int, num: int, schedule: Schedule, host_seconds: float = 0.0) -> float:
    """Return the share of the ranks' time, from the first work to the last, in which they have none.

    host_seconds: what passes before each action. Other than that, sends take no time here.
    """
    num_stages = len(times.forward)
    waiting = [actions_of(schedule, rank, num_ranks, num_stages, num) for rank in range(num_ranks)]
    ended: dict[Action, float] = {}
    free = [0.0] * num_ranks
    while any(waiting):
        for rank, actions in enumerate(waiting):
            while actions and (ready := _ready(actions[0], ended, num_stages, num, times.loss)) is not None:
                kind, stage, _ = actions[0]
                seconds = (times.forward if kind == "forward" else times.backward)[stage]
                free[rank] = ended[actions.pop(0)] = max(free[rank], ready) + host_seconds + seconds
    busy = num * (sum(times.forward) + sum(times.backward)) + times.loss
    return 1.0 - busy / (num_ranks * max(free)) if max(free) else 0.0


def _ready(action: Action, ended: dict[Action, float], num_stages: int, num: int, loss: float) -> float | None:
    """Return when an action's input is there; None: not known yet."""
    kind, stage, microbatch = action
    if kind == "forward":
        return ended.get(("forward", stage - 1, microbatch)) if stage else 0.0
    if stage < num_stages - 1:
        return ended.get(("backward", stage + 1, microbatch))
    end = ended.get(("forward", stage, num - 1 if loss else microbatch))
    return None if end is None else end + loss


def actions_of(schedule: Schedule, rank: int, num_ranks: int, num_stages: int, num: int) -> list[Action]:
    """Return what a rank computes, in order. Source: torch/distributed/pipelining/schedules.py."""
    per_rank = num_stages // num_ranks
    if schedule == "interleaved_1f1b":
        # Rounds of as many micro-batches as there are ranks go through a rank's stages one after the other.
        of_round = num // max(1, num // num_ranks)
        ahead = (per_rank - 1) * of_round + 2 * (num_ranks - 1 - rank)
    else:
        of_round = num
        ahead = num if schedule == "gpipe" or num < num_ranks else num_ranks - 1 - rank
    total = per_rank * num
    ahead = min(ahead, total)
    places = [(i // of_round % per_rank, i // (of_round * per_rank) * of_round + i % of_round) for i in range(total)]
    forwards: list[Action] = [("forward", local * num_ranks + rank, part) for local, part in places]
    backwards: list[Action] = [("backward", (per_rank - 1 - local) * num_ranks + rank, part) for local, part in places]
    both = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
    return [*forwards[:ahead], *both, *backwards[total - ahead :]]


def max_kept(actions: list[Action], of_stage: Mapping[int, float]) -> float:
    """Return the most that a rank keeps at once of what its forwards keep for their backwards.

    of_stage: what a stage's forwards of all micro-batches keep.
    """
    num = 1 + max(part for _, _, part in actions)
    kept = largest = 0.0
    for kind, stage, _ in actions:
        kept += of_stage[stage] / num if kind == "forward" else -of_stage[stage] / num
        largest = max(largest, kept)
    return largest
