"""The ranks that call a function: what they agree on, and rows that they exchange."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_distrec.errors import ConfigError, DistRecError


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a process group, or one rank without a group."""

    rank: int = 0
    num_ranks: int = 1
    group: Any = None

    def agree(
        self, call: str, problem: DistRecError | None, equal: dict[str, Any], own: Any
    ) -> list[Any]:
        """Collective. Return each rank's `own` value, before anything else is exchanged.

        problem: what is wrong with this rank's arguments. equal: name -> value that must be the
        same on all ranks. Raises the first rank's problem, or ConfigError, on every rank.
        """
        headers: list[Any] = [(problem, equal, own)]
        if self.num_ranks > 1:
            headers *= self.num_ranks
            dist.all_gather_object(headers, (problem, equal, own), self.group)
        for rank, (other_problem, _, _) in enumerate(headers):
            if other_problem is not None:
                raise type(other_problem)(f"{call}: rank {rank}: {other_problem}")
        for name in equal:
            values = [header[1][name] for header in headers]
            if any(value != values[0] for value in values):
                raise ConfigError(
                    f"{call}: {name} differs between ranks: {values}. It must be the same."
                )
        return [header[2] for header in headers]

    def gather_rows(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Collective. Return all ranks' rows, rank after rank. counts: how many each rank has."""
        if self.num_ranks == 1:
            return rows
        longest = max(counts)
        gathered = rows.new_empty(self.num_ranks * longest, *rows.shape[1:])
        dist.all_gather_into_tensor(gathered, _padded(rows, longest), group=self.group)
        parts = gathered.split(longest) if longest else [gathered] * self.num_ranks
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def send_rows(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Collective. Send each rank its rows; return (ranks, rows of this rank, ...)."""
        if self.num_ranks == 1:
            return rows[None]
        longest = max(counts)
        padded = torch.cat([_padded(part, longest) for part in rows.split(counts)])
        received = torch.empty_like(padded)
        dist.all_to_all_single(received, padded, group=self.group)
        return received.view(self.num_ranks, longest, *rows.shape[1:])[:, : counts[self.rank]]

    def all_reduce(self, values: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """Collective. Return values reduced over the ranks, in place."""
        if self.num_ranks > 1:
            dist.all_reduce(values, operation, group=self.group)
        return values


def ranks_of(group: Any) -> RankGroup:
    """Return the ranks of a process group; None: the default one, or this process alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return RankGroup()
    return RankGroup(dist.get_rank(group), dist.get_world_size(group), group)


def _padded(rows: Tensor, length: int) -> Tensor:
    padding = rows.new_zeros(length - len(rows), *rows.shape[1:])
    return torch.cat([rows, padding])


class _GatheredRows(torch.autograd.Function):
    """Returns all ranks' rows. Gradients go back to their ranks, summed over those that used
    them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: RankGroup, counts: list[int]) -> Tensor:
        ctx.ranks = ranks
        ctx.counts = counts
        return ranks.gather_rows(rows, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.ranks.send_rows(gradient, ctx.counts).sum(0), None, None


def gathered_rows(rows: Tensor, ranks: RankGroup, counts: list[int]) -> Tensor:
    """Collective, and so is its backward. Return all ranks' rows, with their gradients."""
    if ranks.num_ranks == 1:
        return rows
    return _GatheredRows.apply(rows, ranks, counts)  # type: ignore[no-any-return]


def with_gradient(values: Tensor, is_needed: bool) -> Tensor:
    """Return values that need a gradient where another rank's do: backward takes all ranks."""
    if is_needed and not values.requires_grad:
        return values.detach().requires_grad_()
    return values
