"""How long ranks of a pipeline idle: blocks are timed in a few steps, and a schedule is replayed with their times."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_distrec._compat.torch_distributed import Action, pipeline_order
from lightning_distrec.strategies.stages.chain import Schedule

Enter = Callable[[str, tuple[Any, ...], dict[str, Any]], None]
Leave = Callable[[str, tuple[Any, ...], Any], None]


@contextmanager
def watch_modules(modules: Mapping[str, nn.Module], enter: Enter | None, leave: Leave) -> Iterator[None]:
    """Call enter(path, args, kwargs) before each module's forward inside, and leave(path, args, output) after it."""
    with ExitStack() as hooks:
        for path, module in modules.items():
            # The path as a default, since a closure in a loop would see the last one. A hook that returns None changes
            # neither arguments nor output.
            if enter is not None:
                handle = module.register_forward_pre_hook(
                    lambda _, args, kwargs, path=path: enter(path, args, kwargs), with_kwargs=True
                )
                hooks.callback(handle.remove)
            handle = module.register_forward_hook(lambda _, args, output, path=path: leave(path, args, output))
            hooks.callback(handle.remove)
        yield


MAX_ROUNDS, MAX_SECONDS = 4, 20.0
"""The first round warms up; after these seconds no further one begins."""


@dataclass
class BlockMoments:
    """Seconds of the clock at which a step, and the blocks in it, begin and end."""

    begin: float = 0.0
    loss: float = 0.0
    end: float = 0.0
    enter: dict[str, float] = field(default_factory=dict)
    leave: dict[str, float] = field(default_factory=dict)
    gradient: dict[str, float] = field(default_factory=dict)
    """When the gradient of a block's output is there."""

    def chain_times(self, paths: Sequence[str]) -> list[float] | None:
        """Return what ChainTimes has, in its order; None: a block of the chain was not called."""
        gradient = self.gradient
        if any(path not in self.leave or path not in gradient for path in paths):
            return None
        ends = [self.end, *(gradient[path] for path in paths[:-1])]  # where backward of the block before begins
        return [
            *(self.leave[path] - self.enter[path] for path in paths),
            *(end - gradient[path] for path, end in zip(paths, ends, strict=True)),
            self.enter[paths[0]] - self.begin,
            self.loss - self.leave[paths[-1]],
            gradient[paths[-1]] - self.loss,
        ]


@dataclass(frozen=True, kw_only=True)
class ChainTimes:
    """Seconds that one batch takes in a chain of blocks, and in what is around it."""

    forward: list[float]
    """Of each block."""
    backward: list[float]
    head: float
    """The forward up to the first block."""
    tail: float
    """The forward after the last one."""
    tail_backward: float
    """Its backward."""

    @classmethod
    def lowest(cls, rounds: Sequence[BlockMoments], paths: Sequence[str]) -> "ChainTimes | None":
        """Return the lowest times of a chain, by the paths of its blocks; None: they were not measured."""
        measured = [times for moments in rounds if (times := moments.chain_times(paths)) is not None]
        if not measured:
            return None
        # The lowest, because other programs can only add time.
        *blocks, head, tail, tail_backward = (min(times) for times in zip(*measured, strict=True))
        num = len(paths)
        return cls(forward=blocks[:num], backward=blocks[num:], head=head, tail=tail, tail_backward=tail_backward)


def time_steps(
    module: LightningModule, blocks: Mapping[str, nn.Module], forward: Callable[[], Any]
) -> list[BlockMoments]:
    """Run a training step a few times, and return when its blocks begin and end each time; a GPU is waited for.

    blocks: by path. forward: returns the loss, or a dict with it.
    """

    def read_clock() -> float:
        # The GPU runs behind the host: without this wait, a block's time would be that of queuing its kernels.
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)
        return time.perf_counter()

    rounds: list[BlockMoments] = []
    start = time.perf_counter()
    for number in range(MAX_ROUNDS):
        moments = BlockMoments()
        # Each round does the same: gradients are written, not added to those of the round before.
        module.zero_grad(set_to_none=True)
        with _watch_moments(blocks, moments, read_clock):
            moments.begin = read_clock()
            result = forward()
            moments.loss = moments.end = read_clock()
            loss = result["loss"] if isinstance(result, dict) else result
            if not isinstance(loss, Tensor):
                return rounds
            loss.backward()
            moments.end = read_clock()
        is_late = time.perf_counter() - start > MAX_SECONDS
        # The first round warms up. It counts where it was too slow for a second one.
        if number or is_late:
            rounds.append(moments)
        if is_late:
            break
    return rounds


@contextmanager
def _watch_moments(
    blocks: Mapping[str, nn.Module], moments: BlockMoments, read_clock: Callable[[], float]
) -> Iterator[None]:
    def enter(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        moments.enter[path] = read_clock()

    def leave(path: str, args: tuple[Any, ...], output: Any) -> None:
        moments.leave[path] = read_clock()
        if isinstance(output, Tensor) and output.requires_grad:
            # Called when the gradient of the output is complete, which is when the block's backward begins.
            output.register_hook(partial(note_gradient, path))

    def note_gradient(path: str, gradient: Tensor) -> None:
        moments.gradient[path] = read_clock()

    with watch_modules(blocks, enter, leave):
        yield


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
