"""New rows of a table have the same values whichever shards, threads and form of the init function
draw them."""

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_distrec.sharding import initial_weights
from lightning_distrec.sharding.initial_weights import TableShard, init_rows

ROWS, DIM = 1000, 6


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(initial_weights, "BLOCK_ROWS", 64)
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


def _table(init_fn: Callable[[Tensor], Any]) -> Any:
    config = SimpleNamespace(init_fn=init_fn, num_embeddings=ROWS, embedding_dim=DIM)
    return SimpleNamespace(parameter=None, config=config, full_name="users")


def _drawn(
    init_fn: Callable[[Tensor], Any],
    rectangle: tuple[int, int, int, int] = (0, 0, ROWS, DIM),
    threads: int = 1,
) -> Tensor:
    torch.set_num_threads(threads)
    values = torch.full(rectangle[2:], torch.nan)
    init_rows(_table(init_fn), [TableShard(0, *rectangle, values)], seed=3)
    return values


def _user_function(weight: Tensor) -> Any:
    return nn.init.uniform_(weight, -0.1, 0.1)


def _reassigns(weight: Tensor) -> None:
    weight.data = torch.empty_like(weight).uniform_(-0.1, 0.1)


def test_threads_shards_and_the_form_of_the_function_leave_rows_alike() -> None:
    uniform = partial(nn.init.uniform_, a=-0.1, b=0.1)
    expected = _drawn(_user_function)
    assert len(expected.unique(dim=0)) == ROWS
    assert float(expected.abs().max()) <= 0.1
    random_state = torch.get_rng_state()
    for function, threads in ((uniform, 1), (uniform, 3), (_user_function, 3), (_reassigns, 1)):
        assert torch.equal(_drawn(function, threads=threads), expected)
        for row, column, rows, columns in (
            (0, 0, 64, DIM),
            (50, 0, 400, DIM),
            (130, 2, 870, 3),
            (999, 5, 1, 1),
        ):
            shard = _drawn(function, (row, column, rows, columns), threads)
            assert torch.equal(shard, expected[row : row + rows, column : column + columns])
    assert torch.equal(torch.get_rng_state(), random_state), "the user's draws go on"


def test_what_threads_draw_has_the_values_of_one_thread_in_half_precision_too() -> None:
    values = torch.empty(ROWS, DIM, dtype=torch.float16)
    torch.set_num_threads(3)
    init_rows(_table(nn.init.normal_), [TableShard(0, 0, 0, ROWS, DIM, values)], seed=3)
    assert torch.equal(values, _drawn(nn.init.normal_).half())
