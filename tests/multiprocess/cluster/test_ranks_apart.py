"""Ranks that are in different places, because one of them has caught what all raise, say so instead
of mixing up."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_distrec.cluster import consensus
from lightning_distrec.cluster.consensus import Consensus, RankFlags
from lightning_distrec.errors import RankError
from tests.benchmarks.ranks import count_sockets
from tests.support.ranks import rank_and_num_ranks, run_on_ranks


def _fail() -> None:
    raise ValueError("a bad file")


def _swallow(goes_on_with: str) -> tuple[str, list[Any]]:
    """Let rank 0 go on with something else than rank 1; return what was raised, and what is
    gathered after it."""
    rank, num_ranks = rank_and_num_ranks()
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    ranks = Consensus(20, RankFlags())
    with pytest.raises((ValueError, RankError)):
        ranks.all_or_none("setup", _fail if rank else lambda: None)
    try:
        if rank:
            ranks.all_or_none("setup", bool)
        else:
            _go_on(ranks, goes_on_with)
    except Exception as error:
        return f"{type(error).__name__}: {error}", ranks.all_gather(rank)
    return "", []


def _go_on(ranks: Consensus, kind: str) -> None:
    if kind == "an action":
        ranks.all_or_none("setup", bool)
    else:
        ranks.all_gather(2 if kind == "a value" else "x" * 1000)


@pytest.mark.parametrize("goes_on_with", ["an action", "a value", "a long value"])
def test_all_ranks_raise_one_error_that_says_where_each_is(goes_on_with: str) -> None:
    (first, gathered), (other, _) = run_on_ranks(_swallow, 2, goes_on_with)
    assert first == other
    assert first.startswith("RankError: ranks exchange messages in different places:\n")
    lines = first.splitlines()[1:3]
    assert [line.partition("test_ranks_apart.py:")[0] for line in lines] == ["rank 0: ", "rank 1: "]
    assert (
        lines[0].partition(" in ")[0] != lines[1].replace("rank 1", "rank 0").partition(" in ")[0]
    )
    assert "Do not catch it" in first
    assert gathered == [0, 1]


def _gather() -> tuple[str, list[Any]]:
    rank, num_ranks = rank_and_num_ranks()
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    ranks = Consensus(20, RankFlags())
    refused = ""
    try:
        ranks.all_gather(ranks if rank else "x" * 1000)
    except RankError as error:
        refused = str(error)
    parameter = torch.nn.Parameter(torch.arange(6.0, dtype=torch.bfloat16).reshape(3, 2))
    return refused, ranks.all_gather({"rows": parameter.T[rank], (rank, None): torch.Size([2])})


def _gather_more(tree_bytes: int) -> list[tuple[list[Any], int]]:
    """Return what is gathered of values of one message and of several, and this rank's sockets."""
    rank, num_ranks = rank_and_num_ranks()
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    ranks = Consensus(20, RankFlags())
    before = count_sockets()
    consensus.TREE_BYTES = tree_bytes
    return [(ranks.all_gather("x" * size * rank), count_sockets() - before) for size in (1, 100)]


@pytest.mark.parametrize("tree_bytes", [1 << 20, 1000])
def test_more_ranks_than_four_gather_by_a_tree_and_long_values_by_a_ring(tree_bytes: int) -> None:
    """Seven: no power of two, so that some subtrees are cut."""
    for (short, sockets), (long, _) in run_on_ranks(_gather_more, 7, tree_bytes):
        assert short == ["x" * rank for rank in range(7)]
        assert long == ["x" * 100 * rank for rank in range(7)]
        assert sockets <= 6, "three neighbours, to one and to the other"


def test_values_of_any_length_come_back_and_what_cannot_be_sent_is_an_error_on_all_ranks() -> None:
    for refused, gathered in run_on_ranks(_gather, 2):
        assert refused.startswith("rank 1: a value of type Consensus cannot be sent to other ranks")
        assert [set(values) for values in gathered] == [{"rows", (rank, None)} for rank in range(2)]
        for rank, values in enumerate(gathered):
            rows = values["rows"]
            assert rows.dtype == torch.bfloat16
            assert rows.tolist() == [rank, rank + 2, rank + 4]
            assert not rows.requires_grad
            assert rows.untyped_storage().nbytes() == 6, "not all of what it was a view of"
