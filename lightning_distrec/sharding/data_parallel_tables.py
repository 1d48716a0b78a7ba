"""Lets data-parallel tables be frozen: every rank has a replica of them, averaged by a DDP of torchrec's own.

torchrec's parameter is a slice of the kernel's memory and no leaf, so that torch refuses to freeze it; and its DDP
waits for a gradient in every step, also when the table is frozen.
"""

from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice

from lightning_distrec._compat.torch import use_foreach_for


class ReplicatedTable(TableBatchedEmbeddingSlice):
    """A slice that can be frozen and unfrozen: without a gradient, optimizers leave it alone."""

    learns = True

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the table learns now."""
        return self.learns

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.learns = bool(value)

    def requires_grad_(self, requires_grad: bool = True) -> "ReplicatedTable":
        """Freeze or unfreeze the table."""
        self.learns = bool(requires_grad)
        return self

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        """The averaged gradient; None while the table is frozen."""
        return TableBatchedEmbeddingSlice.grad.fget(self) if self.learns else None  # type: ignore[attr-defined, no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        TableBatchedEmbeddingSlice.grad.fset(self, value)  # type: ignore[attr-defined]


use_foreach_for(ReplicatedTable)  # else one such table makes optimizers launch kernels for each parameter alone


def make_freezable(weight: TableBatchedEmbeddingSlice) -> TableBatchedEmbeddingSlice:
    """Turn torchrec's own parameter into one that can be frozen."""
    # By its class, since it must stay the same object: torchrec's DDP and optimizer hold references to it. The class
    # adds properties only, so that the object's memory layout fits.
    weight.__class__ = ReplicatedTable
    return weight


class ZeroGradient(torch.autograd.Function):
    """The identity, whose gradient is zero: the table's DDP gets the gradient that it waits for, and rows stay frozen.

    Zeros, not a product with 0, which would not remove a gradient that is not finite.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return torch.zeros_like(gradient)
