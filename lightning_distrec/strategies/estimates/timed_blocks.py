"""How long forward and backward of a module's blocks take, and what a step computes before and after them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_distrec.strategies.estimates.block_profile import blocks_of

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


@dataclass(frozen=True, kw_only=True)
class ChainTimes:
    """Seconds that one batch takes in a chain of blocks, and in what is around it."""

    forward: list[float]
    """Of each block."""
    backward: list[float]
    before: float
    """The forward up to the first block."""
    after: float
    """The forward after the last one."""
    after_backward: float
    """Its backward."""


class StepTimes:
    """The times of a few steps."""

    def __init__(self) -> None:
        self.rounds: list[BlockMoments] = []

    def of_chain(self, paths: Sequence[str]) -> ChainTimes | None:
        """Return the lowest times of a chain, by the paths of its blocks; None: they were not measured."""
        measured = [each for each in (_of_chain(moments, paths) for moments in self.rounds) if each is not None]
        if not measured:
            return None
        lowest = [min(times) for times in zip(*measured, strict=True)]
        num = len(paths)
        return ChainTimes(
            forward=lowest[:num],
            backward=lowest[num : 2 * num],
            before=lowest[-3],
            after=lowest[-2],
            after_backward=lowest[-1],
        )


def time_steps(module: nn.Module, forward: Callable[[], Any]) -> StepTimes:
    """Run a training step's forward and backward a few times, and return when its blocks begin and end.

    forward: returns the loss, or a dict with it.
    """
    times = StepTimes()
    began = time.perf_counter()
    for number in range(MAX_ROUNDS):
        module.zero_grad(set_to_none=True)
        moments = BlockMoments()
        with _watched(module, moments):
            moments.begin = time.perf_counter()
            result = forward()
            loss = result["loss"] if isinstance(result, dict) else result
            if not isinstance(loss, Tensor):
                return times
            moments.loss = time.perf_counter()
            loss.backward()
            moments.end = time.perf_counter()
        if number or time.perf_counter() - began > MAX_SECONDS:
            times.rounds.append(moments)
        if time.perf_counter() - began > MAX_SECONDS:
            break
    return times


def _of_chain(moments: BlockMoments, paths: Sequence[str]) -> list[float] | None:
    if any(path not in moments.leave or path not in moments.gradient for path in paths):
        return None
    ends = [moments.gradient[path] for path in paths[:-1]]  # of backward: where that of the block before begins
    return [
        *(moments.leave[path] - moments.enter[path] for path in paths),
        *(end - moments.gradient[path] for path, end in zip(paths, [moments.end, *ends], strict=True)),
        moments.enter[paths[0]] - moments.begin,
        moments.loss - moments.leave[paths[-1]],
        moments.gradient[paths[-1]] - moments.loss,
    ]


@contextmanager
def _watched(module: nn.Module, moments: BlockMoments) -> Iterator[None]:
    def now(found: dict[str, float], path: str, *_: Any) -> None:
        found[path] = time.perf_counter()

    def leave(path: str, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        now(moments.leave, path)
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(partial(now, moments.gradient, path))

    with ExitStack() as hooks:
        for path, block in blocks_of(module).items():
            hooks.callback(block.register_forward_pre_hook(partial(now, moments.enter, path)).remove)
            hooks.callback(block.register_forward_hook(partial(leave, path)).remove)
        yield
