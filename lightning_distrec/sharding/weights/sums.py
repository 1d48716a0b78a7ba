"""Sums and norms of shards in a step: over all ranks, with the gradients that one process has."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distrec.sharding.weights.shard_of import ShardOf, without_guard

SUMS = frozenset({"sum", "mean", "norm", "vector_norm", "linalg_vector_norm", "linalg_norm", "frobenius_norm"})
_steps: list[bool] = []


@contextmanager
def in_step() -> Iterator[None]:
    """All ranks run the user's step inside of the context, so that what it sums may be summed over them."""
    _steps.append(True)
    try:
        yield
    finally:
        _steps.pop()


def is_in_step() -> bool:
    """Whether the user's step runs now."""
    return bool(_steps)


def is_sum_in_step(of: ShardOf, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this is a sum or norm over all elements that every rank computes now."""
    options = {key for key, value in kwargs.items() if value not in (None, False)} - {
        "p",
        "ord",
        "dtype",
        "input",
        "self",
        "x",
    }
    return bool(_steps) and of.alone and of.what == "weight" and not options and len(args) <= 2


def sum_over_ranks(name: str, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """Collective. Return the sum, mean or norm over all elements of a table, (), the same on every rank."""
    values = args[0] if args else next(kwargs[key] for key in ("input", "self", "x") if key in kwargs)
    of: ShardOf = values.of
    order = next((kwargs[key] for key in ("p", "ord") if kwargs.get(key) is not None), args[1] if args[1:] else None)
    with without_guard():
        values = values.as_subclass(Tensor)
        if kwargs.get("dtype") is not None:
            values = values.to(kwargs["dtype"])
        if name in ("sum", "mean"):
            if order is not None:
                raise of.refusal(f"{name} over some dims")
            total: Tensor = _Sum.apply(values, of)
            return total if name == "sum" else total / (of.shape[0] * of.shape[1])
        power = 2.0 if order in (None, "fro") else order
        if not isinstance(power, (int, float)) or not 0 < power < float("inf"):
            raise of.refusal(f"the norm of order {order}")
        total = _Sum.apply(values.square() if power == 2.0 else values.abs().pow(power), of)
        # The gradient of a norm that is 0 is 0, as torch has it.
        return torch.where(total > 0, total, 1.0).pow(1.0 / power) * (total > 0)


class _Sum(torch.autograd.Function):
    """Returns the sum over the elements of all shards; the gradients are those of this rank's elements."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, of: ShardOf) -> Tensor:
        ctx.shape, ctx.of = values.shape, of
        total = values.sum(dtype=torch.float64)
        dist.all_reduce(total, group=of.group)
        return total.to(values.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        # Ranks with unequal batches weight their losses, and the mean of all weights is 1; a shard has one rank's term.
        return (gradient / ctx.of.loss_weight()).expand(ctx.shape), None
