"""Data-parallel tables in the user's optimizer."""

import torch
from torch import nn
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice

from lightning_distrec._compat import torch as _torch
from lightning_distrec.sharding.shard_tables import make_freezable


def step(foreach: bool) -> list[torch.Tensor]:
    torch.manual_seed(1)
    memory = nn.Parameter(torch.randn(12))
    memory.grad = torch.randn(12)
    table = make_freezable(TableBatchedEmbeddingSlice(memory, 3, 9, 3, 2))
    layer = nn.Parameter(torch.randn(4))
    layer.grad = torch.randn(4)
    torch.optim.Adam([table, layer], lr=0.1, foreach=foreach).step()
    return [memory.detach(), table.detach(), layer.detach()]


def test_a_table_keeps_an_optimizer_in_its_foreach_form_with_the_same_numbers() -> None:
    from torch.optim.optimizer import _foreach_supported_types

    table = make_freezable(TableBatchedEmbeddingSlice(nn.Parameter(torch.zeros(6)), 0, 6, 3, 2))
    assert type(table) in _foreach_supported_types, _torch.use_foreach_for.__doc__
    for first, other in zip(step(True), step(False), strict=True):
        assert torch.equal(first, other)
