"""What a training step calls in the main thread, and which threads serve it: neither varies as
times do."""

import io
import warnings
from collections import Counter
from contextlib import redirect_stdout
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.benchmarks.host_calls import CONTENDERS, COUNTED_TURN, calls_of
from tests.benchmarks.performance_contenders import PREFETCHED, ByTrainer, our_strategy
from tests.benchmarks.performance_model import Batches
from tests.benchmarks.turns import join_ranks, silence
from tests.support.click_model import ClickModel, train_sharded
from tests.support.ranks import THREADS_HAVE_NAMES, num_socket_threads, run_on_ranks

FEW, MANY = 8, 24
LIMIT = 375
"""Of functions of ours in a step with FEW tables; each takes 0.3 to 1 microseconds. Lower it when
there are fewer.

Two are the environment's, which Lightning asks: ours where ranks have RANK, as here.
"""
LIMITS_OF_OTHERS = {"not prefetched": 251, "validation": 259, "validation, not prefetched": 145}
"""Of functions of ours in other steps."""
LIMIT_NOT_PREFETCHED = 1_200
"""Of functions of any package, of which a step by hand calls 1,441."""
LIMIT_OF_A_TABLE = 0.1
"""Of functions of ours for each further table."""
LIMIT_OF_LOGGING = 37
"""Of functions of any package, for a metric and a logged loss."""


def test_a_step_calls_no_more_functions_than_before() -> None:
    functions, logged, few, many, others = run_on_ranks(_calls, 2)[0]
    logging_calls = logged - functions
    assert 0 < logging_calls.total() <= LIMIT_OF_LOGGING, logging_calls.most_common(40)
    assert 0 < few.total() <= LIMIT, few.most_common(40)
    assert (many.total() - few.total()) / (MANY - FEW) <= LIMIT_OF_A_TABLE, (
        many - few
    ).most_common(20)
    assert 0 < others["not prefetched"].total() <= LIMIT_NOT_PREFETCHED
    for name, limit in LIMITS_OF_OTHERS.items():
        calls = _ours(others[name])
        assert 0 < calls.total() <= limit, (name, calls.most_common(40))


class Validates(ByTrainer):
    """Trainer.validate with the training step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.module.validation_step = self.module.training_step

    def run(self, trainer: pl.Trainer, loader: DataLoader) -> None:
        trainer.validate(self.module, loader)


OTHERS = {
    "not prefetched": partial(ByTrainer, strategy=our_strategy),
    "validation": partial(Validates, strategy=PREFETCHED),
    "validation, not prefetched": partial(Validates, strategy=our_strategy),
}


def _ours(functions: Counter[str]) -> Counter[str]:
    return Counter({n: k for n, k in functions.items() if n.startswith("lightning_distrec/")})


def _calls() -> list[Any]:
    """Return how often a step calls each function, without and with logging; those of
    lightning_distrec, with FEW and MANY tables; and all of other steps."""
    torch.set_num_threads(1)
    join_ranks()
    silence()
    counts: list[Any] = []
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for num_tables in (FEW, MANY):
            batches = Batches(1_000, COUNTED_TURN.steps, dist.get_rank(), num_tables, batch_size=8)
            functions, _ = calls_of(CONTENDERS["ours"](1_000, batches, COUNTED_TURN))
            if num_tables == FEW:
                logged, _ = calls_of(CONTENDERS["ours, logged"](1_000, batches, COUNTED_TURN))
                counts += [functions, logged]
                others = {
                    name: calls_of(make(1_000, batches, COUNTED_TURN))[0]
                    for name, make in OTHERS.items()
                }
            counts.append(_ours(functions))
    return [*counts, others]


@pytest.mark.skipif(not THREADS_HAVE_NAMES, reason="this torch gives these threads no name")
def test_one_thread_serves_the_sockets_of_a_step() -> None:
    # A second one is of the group for what is agreed on now and then, which connects few ranks.
    assert run_on_ranks(_threads_of_a_fit, 2) == [2, 2]


def _threads_of_a_fit() -> int:
    train_sharded(ClickModel(torch.optim.SGD, {"lr": 0.1}), 2)
    return num_socket_threads()
