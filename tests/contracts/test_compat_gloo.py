"""Exchanges between nodes whose receives come first: the bits of torch's own all-to-all, in every form of its call."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distrec._compat import gloo
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks

NUM_RANKS = 3
DTYPES = (torch.int64, torch.float32, torch.float16)


def _sizes(seed: int) -> list[list[int]]:
    """Return how many rows each rank sends to each; many of them none."""
    draw = random.Random(seed)
    return [[draw.choice((0, 0, 1, 3, 700)) for _ in range(NUM_RANKS)] for _ in range(NUM_RANKS)]


def _exchange(seed: int, **options: Any) -> tuple[Tensor, Any]:
    """Start an exchange of drawn sizes; return its output and what was returned."""
    rank, sizes = dist.get_rank(), _sizes(seed)
    generator = torch.Generator().manual_seed(100 * seed + rank)
    sent = torch.randint(-1000, 1000, (sum(sizes[rank]), 4), generator=generator).to(DTYPES[seed % 3])
    received = [row[rank] for row in sizes]
    output = sent.new_empty(sum(received), 4)
    return output, dist.all_to_all_single(output, sent, received, sizes[rank], **options)


def _meet() -> None:
    if not dist.is_initialized():
        rank, num_ranks = rank_and_num_ranks()
        dist.init_process_group("gloo", rank=rank, world_size=num_ranks)


def _all(runs_at_once: bool) -> list[Tensor]:
    if not runs_at_once:
        results = [_exchange(seed) for seed in range(12)]
        assert all(returned is None for _, returned in results)
        return [output for output, _ in results]
    group = dist.new_group(backend="gloo")
    results = [_exchange(seed, group=group if seed % 2 else None, async_op=True) for seed in range(12)]
    for _, work in reversed(results):
        work.wait()
        work.wait()
    return [output for output, _ in results]


@contextmanager
def _counted_calls() -> Iterator[list[int]]:
    """Let torch's own function count its calls: an element for each."""
    original, calls = dist.all_to_all_single, []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return original(*args, **options)

    dist.all_to_all_single = counted
    try:
        yield calls
        assert dist.all_to_all_single is counted
    finally:
        dist.all_to_all_single = original


def _compare(runs_at_once: bool) -> tuple[list[Tensor], list[Tensor], int]:
    _meet()
    expected = _all(runs_at_once)
    with _counted_calls() as calls, gloo.receive_first((0, 1, 1)):
        actual = _all(runs_at_once)
        # Without sizes it is torch's own.
        dist.all_to_all_single(torch.empty(NUM_RANKS), torch.ones(NUM_RANKS))
    return expected, actual, len(calls)


def _on_one_node() -> int:
    _meet()
    with _counted_calls() as calls, gloo.receive_first((0, 0, 0)):
        _all(False)
    return len(calls)


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """By rank."""
    calls = {"in turn": (_compare, False), "at once": (_compare, True), "one node": (_on_one_node,)}
    return run_each_on_ranks(calls, NUM_RANKS)


@pytest.mark.parametrize("name", ["in turn", "at once"])
def test_exchanges_between_nodes_have_the_bits_of_torchs_own(name: str, results: list[dict[str, Any]]) -> None:
    for result in results:
        expected, actual, calls = result[name]
        assert calls == 1
        assert len(expected) == len(actual) == 12
        assert all(torch.equal(*pair) for pair in zip(expected, actual, strict=True))
        assert any(len(output) > 700 for output in actual)


def test_within_a_node_they_are_torchs_own(results: list[dict[str, Any]]) -> None:
    assert [result["one node"] for result in results] == [12] * NUM_RANKS
