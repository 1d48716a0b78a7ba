"""Random draws while stages compute: alike on all ranks where the user's step draws, and different in blocks."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch
from lightning.pytorch.utilities.seed import isolate_rng


class StepDraws:
    """Seeds what a step draws by its number, and leaves the rank's own generators as they were.

    Every rank runs the user's step up to the chain, and the last one runs it to its end. They must draw the same there:
    one mixes inputs, another one labels, for example. And samplers, which draw between steps, must not differ because
    one stage has more dropout than another.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._step = 0

    def next_step(self) -> None:
        """Begin the next step."""
        self._step += 1

    @contextmanager
    def of(self, part: int) -> Iterator[None]:
        """Around a part of a step. part: 0 and up: the user's step of a micro-batch; below 0: the blocks of a stage."""
        seed = hash((self._seed, self._step, part)) % 2**32
        with isolate_rng():
            torch.manual_seed(seed)
            numpy.random.seed(seed)
            random.seed(seed)
            yield
