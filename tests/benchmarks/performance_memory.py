"""What each rank holds of the tables, and by how much its process grows for them."""

import io
import os
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist

from lightning_distrec._compat.torch import without_torch_function
from tests.benchmarks.performance_contenders import ByTrainer, Turn, missing_option, our_strategy
from tests.benchmarks.performance_model import Batches
from tests.benchmarks.performance_rounds import join_ranks, silence


@dataclass(frozen=True)
class Held:
    """Bytes of one rank."""

    shards: int
    """Of the tables' shards."""
    growth: int
    """By which the process was larger in the middle of training than before the module was
    built."""


class _Look(pl.Callback):
    """Looks at the shards and at the process in the middle of a fit."""

    def __init__(self, step: int) -> None:
        self.step, self.shards, self.process = step, 0, 0

    def on_train_batch_start(
        self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self.step:
            table_values = trainer.strategy.run_tables.shards.shards.values()
            weights = [shard.weight for shards in table_values for shard in shards]
            with without_torch_function():  # as plain tensors, with the shapes of shards
                self.shards = sum(weight.numel() * weight.element_size() for weight in weights)
            self.process = _process_bytes()


def held(num_rows: int) -> Held:
    """Collective. Train for a few steps on this rank, one of those that `run_on_ranks` runs;
    returns what it held."""
    join_ranks()
    silence()
    turn, strategy = (
        Turn(5, 10, 3),
        partial(our_strategy, 1 if missing_option("ours, prefetched") else 3),
    )
    with redirect_stdout(io.StringIO()):
        # What a first fit loads and keeps is not the tables'.
        ByTrainer(1000, Batches(1000, turn.steps, dist.get_rank()), turn, strategy).turn()
        batches = Batches(num_rows, turn.steps, dist.get_rank())
        initial, look = _process_bytes(), _Look(turn.first + turn.counted)
        ByTrainer(num_rows, batches, turn, strategy).turn(look)
    return Held(look.shards, look.process - initial)


def _process_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
