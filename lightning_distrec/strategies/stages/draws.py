"""Random draws while stages compute: alike on all ranks where the user's step draws, and different in blocks."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

import numpy
import torch
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_distrec.cluster.consensus import Consensus


class StepDraws:
    """Seeds what a step draws, and leaves the rank's own generators as they were.

    Every rank runs the user's step up to the chain, and the last one runs it to its end. They must draw the same there:
    one mixes inputs, another one labels, for example. And samplers, which draw between steps, must not differ because
    one stage has more dropout than another.

    A step's seed is made of its number and of torch's generator, whose state checkpoints hold: a run that resumes draws
    what one that never stopped does.
    """

    def __init__(self, messages: Consensus) -> None:
        self._messages = messages
        self._is_first = True
        self.seed = 0
        """That of the step."""
        self.has_drawn: bool | None = None
        """Whether a part of a step has drawn since this was set to False; None: nobody asks."""

    def begin_step(self, *number: int) -> None:
        """Collective for the first step. Begin a step."""
        state = torch.get_rng_state()
        if self._is_first:  # a job that does not seed itself has ranks with states of their own
            self._is_first = False
            state = self._messages.all_gather(state)[0]
            torch.set_rng_state(state)
        self.seed = crc32(state.numpy().tobytes(), crc32(repr(number).encode()))

    @contextmanager
    def of(self, part: int) -> Iterator[None]:
        """Around a part of a step. part: 0 and up: the user's step of a micro-batch; below 0: the blocks of a rank."""
        seed = hash((self.seed, part)) % 2**32
        with isolate_rng():
            torch.manual_seed(seed)
            numpy.random.seed(seed)
            random.seed(seed)
            yield
            if self.has_drawn is False:
                drawn = torch.get_rng_state(), repr(numpy.random.get_state()), random.getstate()
                torch.manual_seed(seed)
                numpy.random.seed(seed)
                random.seed(seed)
                state = torch.get_rng_state(), repr(numpy.random.get_state()), random.getstate()
                self.has_drawn = not (torch.equal(drawn[0], state[0]) and drawn[1:] == state[1:])
