"""What a training step calls in the main thread, and which threads serve it: neither varies as
times do."""

import io
import warnings
from collections import Counter
from contextlib import redirect_stdout

import pytest
import torch
import torch.distributed as dist

from tests.benchmarks.host_calls import CONTENDERS, COUNTED_TURN, calls_of
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
LIMIT_OF_A_TABLE = 0.1
"""Of functions of ours for each further table."""
LIMIT_OF_LOGGING = 37
"""Of functions of any package, for a metric and a logged loss."""


def test_a_step_calls_no_more_functions_than_before() -> None:
    functions, logged, few, many = run_on_ranks(_calls, 2)[0]
    logging_calls = logged - functions
    assert 0 < logging_calls.total() <= LIMIT_OF_LOGGING, logging_calls.most_common(40)
    assert 0 < few.total() <= LIMIT, few.most_common(40)
    assert (many.total() - few.total()) / (MANY - FEW) <= LIMIT_OF_A_TABLE, (
        many - few
    ).most_common(20)


def _calls() -> list[Counter[str]]:
    """Return how often a step calls each function, without and with logging; and those of
    lightning_distrec."""
    torch.set_num_threads(1)
    join_ranks()
    silence()
    counts = []
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for num_tables in (FEW, MANY):
            batches = Batches(1_000, COUNTED_TURN.steps, dist.get_rank(), num_tables, batch_size=8)
            functions, _ = calls_of(CONTENDERS["ours"](1_000, batches, COUNTED_TURN))
            if num_tables == FEW:
                logged, _ = calls_of(CONTENDERS["ours, logged"](1_000, batches, COUNTED_TURN))
                counts += [functions, logged]
            counts.append(
                Counter({n: k for n, k in functions.items() if n.startswith("lightning_distrec/")})
            )
    return counts


@pytest.mark.skipif(not THREADS_HAVE_NAMES, reason="this torch gives these threads no name")
def test_one_thread_serves_the_sockets_of_a_step() -> None:
    # A second one is of the group for what is agreed on now and then, which connects few ranks.
    assert run_on_ranks(_threads_of_a_fit, 2) == [2, 2]


def _threads_of_a_fit() -> int:
    train_sharded(ClickModel(torch.optim.SGD, {"lr": 0.1}), 2)
    return num_socket_threads()
