"""What a few steps show about the blocks of a module's containers: what is passed on between them, and their times."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn


@dataclass(frozen=True)
class BlockProfile:
    """Of each block of an nn.Sequential or nn.ModuleList, by its path."""

    input_bytes: dict[str, int] = field(default_factory=dict)
    """Of its first argument."""
    follows: set[str] = field(default_factory=set)
    """Those whose first argument is the very output of the block before."""


def numbered_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return path -> block of all nn.Sequentials and nn.ModuleLists in a module."""
    return {
        f"{name}.{number}": block
        for name, container in module.named_modules()
        if name and isinstance(container, (nn.Sequential, nn.ModuleList))
        for number, block in enumerate(container)
    }


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


@contextmanager
def watch_blocks(module: nn.Module, profile: BlockProfile) -> Iterator[None]:
    """Record what the blocks of a module get while they run inside."""
    # Held for the whole step: `is` below could meet another object at the address of one that was freed.
    outputs: dict[str, Any] = {}

    def enter(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if args and isinstance(args[0], Tensor):
            profile.input_bytes[path] = args[0].numel() * args[0].itemsize
            container, _, number = path.rpartition(".")
            # The very object: an equal one may have passed through code between the blocks.
            if outputs.get(f"{container}.{int(number) - 1}") is args[0]:
                profile.follows.add(path)

    def leave(path: str, args: tuple[Any, ...], output: Any) -> None:
        outputs[path] = output

    with watch_modules(numbered_blocks(module), enter, leave):
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


class StepTimes:
    """The times of a few steps."""

    def __init__(self) -> None:
        self.rounds: list[BlockMoments] = []

    def chain_times(self, paths: Sequence[str]) -> ChainTimes | None:
        """Return the lowest times of a chain, by the paths of its blocks; None: they were not measured."""
        measured = [times for moments in self.rounds if (times := self._round_times(moments, paths)) is not None]
        if not measured:
            return None
        # The lowest, because other programs can only add time.
        lowest = [min(times) for times in zip(*measured, strict=True)]
        num = len(paths)
        return ChainTimes(
            forward=lowest[:num],
            backward=lowest[num : 2 * num],
            head=lowest[-3],
            tail=lowest[-2],
            tail_backward=lowest[-1],
        )

    def _round_times(self, moments: BlockMoments, paths: Sequence[str]) -> list[float] | None:
        gradient = moments.gradient
        if any(path not in moments.leave or path not in gradient for path in paths):
            return None
        ends = [moments.end, *(gradient[path] for path in paths[:-1])]  # where backward of the block before begins
        return [
            *(moments.leave[path] - moments.enter[path] for path in paths),
            *(end - gradient[path] for path, end in zip(paths, ends, strict=True)),
            moments.enter[paths[0]] - moments.begin,
            moments.loss - moments.leave[paths[-1]],
            gradient[paths[-1]] - moments.loss,
        ]


def time_steps(module: LightningModule, blocks: Mapping[str, nn.Module], forward: Callable[[], Any]) -> StepTimes:
    """Run a training step a few times, and return when its blocks begin and end; a GPU is waited for each time.

    blocks: by path. forward: returns the loss, or a dict with it.
    """

    def read_clock() -> float:
        # The GPU runs behind the host: without this wait, a block's time would be that of queuing its kernels.
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)
        return time.perf_counter()

    times = StepTimes()
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
                return times
            loss.backward()
            moments.end = read_clock()
        is_late = time.perf_counter() - start > MAX_SECONDS
        # The first round warms up. It counts where it was too slow for a second one.
        if number or is_late:
            times.rounds.append(moments)
        if is_late:
            break
    return times


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
