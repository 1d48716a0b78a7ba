"""Sparse gradients are the same to the optimizer, whichever way they travel.

The truth is one process with the batches of all ranks: Lightning's "ddp" adds sparse gradients up
by gloo itself, which ends processes once in some thousand steps.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_distrec import TunedDDPStrategy
from lightning_distrec.strategies.data_parallel.gradient_exchange import sparse_hook
from tests.multiprocess.strategies.test_dense_strategies import TwoTables
from tests.support.dense_models import KINDS, WithEmbedding
from tests.support.dense_runs import fit
from tests.support.ranks import run_on_warm_ranks

KINDS["TwoTables"] = TwoTables


class LooksUpOneTable(WithEmbedding):
    """Has a table that no step looks up."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Embedding(5, 6, sparse=True)


KINDS["LooksUpOneTable"] = LooksUpOneTable


def _unused(_: Any) -> str:
    try:
        fit("LooksUpOneTable", TunedDDPStrategy(find_unused_parameters=True))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_table_that_no_step_looks_up_is_reported_with_the_way_out() -> None:
    for message in run_on_warm_ranks(_unused, 2, None):
        assert message.startswith("a step looked up no row of an nn.Embedding(sparse=True)")
        assert "sparse=False, or use strategy='torchrec_sharded'" in message


def _averaged(num_rows: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Exchange gradients of a table of 9 rows; each rank has as many rows of it as its number
    says."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    rows = torch.randint(9, (1, num_rows[rank]))
    actual = []
    for sparse_grads in ("sparse", "dense"):
        gradient = torch.sparse_coo_tensor(
            rows, torch.ones(rows.shape[1], 2) * (rank + 1), (9, 2), check_invariants=True
        )
        bucket: Any = SimpleNamespace(buffer=lambda gradient=gradient: gradient)
        actual.append((gradient.to_dense(), sparse_hook(sparse_grads)(None, bucket).wait()))
    return actual


@pytest.mark.parametrize("num_rows", [(0, 0, 0), (0, 5, 2), (7, 0, 30)])
def test_ranks_that_looked_up_nothing_are_averaged_too(num_rows: tuple[int, ...]) -> None:
    results = run_on_warm_ranks(_averaged, 3, list(num_rows))
    for way_results in zip(*results, strict=True):
        mean = sum(local for local, _ in way_results) / 3
        looked_up = sum(local for local, _ in way_results)[:, 0].nonzero()[:, 0].tolist()
        for _, averaged in way_results:
            torch.testing.assert_close(averaged.to_dense(), mean)
            assert averaged.is_coalesced()
            assert averaged.indices()[0].tolist() == looked_up
