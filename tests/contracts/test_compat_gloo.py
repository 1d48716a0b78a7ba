"""Gloo groups that share a thread, and exchanges between nodes whose receives come first: the bits
of torch's own."""

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distrec._compat import gloo
from tests.support.ranks import (
    THREADS_HAVE_NAMES,
    join_group,
    num_socket_threads,
    run_each_on_ranks,
)

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
    sent = torch.randint(-1000, 1000, (sum(sizes[rank]), 4), generator=generator).to(
        DTYPES[seed % 3]
    )
    received = [row[rank] for row in sizes]
    output = sent.new_empty(sum(received), 4)
    return output, gloo.tables_dist.all_to_all_single(
        output, sent, received, sizes[rank], **options
    )


def _all(runs_at_once: bool) -> list[Tensor]:
    if not runs_at_once:
        results = [_exchange(seed) for seed in range(12)]
        assert all(returned is None for _, returned in results)
        return [output for output, _ in results]
    group = dist.new_group(backend="gloo")
    results = [
        _exchange(seed, group=group if seed % 2 else None, async_op=True) for seed in range(12)
    ]
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
    join_group()
    expected = _all(runs_at_once)
    with _counted_calls() as calls, gloo.receive_first((0, 1, 1)):
        actual = _all(runs_at_once)
        # Without sizes it is torch's own.
        gloo.tables_dist.all_to_all_single(torch.empty(NUM_RANKS), torch.ones(NUM_RANKS))
        # As are the user's: a rank may omit its sizes, and poll.
        sent, received, sizes = (
            torch.arange(2.0 * NUM_RANKS),
            torch.empty(2 * NUM_RANKS),
            [2] * NUM_RANKS,
        )
        work = dist.all_to_all_single(
            received, sent, *([] if dist.get_rank() else [sizes, sizes]), async_op=True
        )
        deadline = time.monotonic() + 20
        while not work.is_completed():
            assert time.monotonic() < deadline
        assert torch.equal(received, sent[2 * dist.get_rank() :][:2].repeat(NUM_RANKS))
    return expected, actual, len(calls)


def _on_one_node() -> int:
    join_group()
    with _counted_calls() as calls, gloo.receive_first((0, 0, 0)):
        _all(False)
    return len(calls)


def _groups(level: dist.DebugLevel) -> dict[str, Any]:
    """Make groups, of all ranks and of some; return what they sum, their threads, and what ends a
    wait too long."""
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"  # of this rank
    join_group()
    level_before, limit = dist.get_debug_level(), timedelta(seconds=0.5)
    dist.set_debug_level(level)
    before, rank = num_socket_threads(), dist.get_rank()
    with gloo.one_socket_thread():
        groups = {
            name: dist.new_group(timeout=limit, backend="gloo") for name in ("first", "second")
        }
        some = dist.new_group([1, 2], limit, "gloo")
    dist.set_debug_level(level_before)
    if rank:
        groups["of some"] = some
    sums = {name: torch.tensor([float(rank)]) for name in groups}
    for name, values in sums.items():
        dist.all_reduce(values, group=groups[name])
    actual: dict[str, Any] = {name: values.item() for name, values in sums.items()}
    actual["threads"] = num_socket_threads() - before
    own = dist.new_group(backend="gloo")
    dist.all_reduce(torch.zeros(1), group=own)  # its thread has its name by then
    actual["threads of torch's"] = num_socket_threads() - before - actual["threads"]
    began = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match="(?i)timed out|in 500 ms"):
            dist.all_reduce(torch.zeros(1), group=groups["first"])
    actual["seconds"] = time.monotonic() - began
    dist.barrier()
    return actual


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """By rank."""
    calls = {"in turn": (_compare, False), "at once": (_compare, True), "one node": (_on_one_node,)}
    return run_each_on_ranks(calls, NUM_RANKS)


@pytest.mark.parametrize("name", ["in turn", "at once"])
def test_exchanges_between_nodes_have_the_bits_of_torchs_own(
    name: str, results: list[dict[str, Any]]
) -> None:
    for result in results:
        expected, actual, calls = result[name]
        assert calls == 2
        assert len(expected) == len(actual) == 12
        assert all(torch.equal(*pair) for pair in zip(expected, actual, strict=True))
        assert any(len(output) > 700 for output in actual)


def test_within_a_node_they_are_torchs_own(results: list[dict[str, Any]]) -> None:
    assert [result["one node"] for result in results] == [12] * NUM_RANKS


def test_groups_share_a_thread_and_have_their_own_limit() -> None:
    calls = {level: (_groups, getattr(dist.DebugLevel, level)) for level in ("OFF", "DETAIL")}
    for rank, result in enumerate(run_each_on_ranks(calls, NUM_RANKS)):
        for level, actual in result.items():
            assert (actual["first"], actual["second"], actual.get("of some")) == (
                3,
                3,
                3 if rank else None,
            )
            # The first ones start it.
            if THREADS_HAVE_NAMES:
                assert (actual["threads"], actual["threads of torch's"]) == (int(level == "OFF"), 1)
            assert rank or 0.4 < actual["seconds"] < 5
