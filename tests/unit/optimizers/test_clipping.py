"""Clipping by a norm: its numbers, and how many kernels it launches."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

from lightning_distrec.optimizers.clipping import clip_by_norm


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def parameters(count: int) -> list[nn.Parameter]:
    """Return parameters with gradients: of two types, one without elements, and one sparse
    gradient."""
    torch.manual_seed(1)
    made = [
        nn.Parameter(torch.zeros(3, 4, dtype=(torch.float32, torch.float64)[i % 2]))
        for i in range(count)
    ]
    for parameter in made:
        parameter.grad = torch.randn_like(parameter)
    empty, table = nn.Parameter(torch.zeros(0, 4)), nn.Embedding(5, 2, sparse=True)
    empty.grad = torch.zeros(0, 4)
    table(torch.tensor([1, 3, 1])).sum().backward()
    return [*made, empty, table.weight]


def test_norm_and_gradients_are_those_of_torch(group: None) -> None:
    for limit in (0.5, 1000.0):
        actual, reference = parameters(8), parameters(8)
        reference[-1].grad = reference[-1].grad.to_dense()
        norm = clip_by_norm(actual, {id(actual[-1])}, limit)
        expected = clip_grad_norm_(reference, limit)
        torch.testing.assert_close(norm, expected.float())
        for parameter, other in zip(actual, reference, strict=True):
            torch.testing.assert_close(parameter.grad.to_dense(), other.grad)
