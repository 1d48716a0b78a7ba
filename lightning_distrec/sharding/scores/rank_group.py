"""The ranks that call a function: what they agree on, and rows that they exchange."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_distrec import errors, gpu
from lightning_distrec.errors import ConfigError, DistRecError
from lightning_distrec.ranks import Ranks, number_for

T = TypeVar("T")
Numbers = tuple[int, int]
MESSAGE = 3
"""Numbers that ranks exchange first."""
FUNCTION = "the function"
"""Name of what ranks compare first."""


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a process group, or one rank without a group."""

    rank: int = 0
    num_ranks: int = 1
    group: Any = None
    job: Ranks | None = None
    """Of all ranks of the run: what is agreed on waits for no GPU."""

    def agree(
        self, call: str, equal: dict[str, Any], prepare: Callable[[], tuple[T, Numbers]]
    ) -> tuple[T, list[Numbers]]:
        """Collective. Return what `prepare` returns, and each rank's numbers of it.

        Nothing else is exchanged before. equal: name -> value that must be the same on all ranks.
        Raises DistRecError on every rank: that of the first rank on which `prepare` raises, or
        ConfigError where ranks call other functions, or with other values.
        """
        prepared = None
        numbers: Numbers = (0, 0)
        problem = ("", "")
        try:
            prepared, numbers = prepare()
        except DistRecError as error:
            problem = (type(error).__name__, str(error))
        call_in_words = {FUNCTION: call}
        for name, value in equal.items():
            call_in_words[name] = str(value)
        # A number stands for the words, which are sent where it differs.
        own_numbers = (number_for((problem, call_in_words)), *numbers)
        messages = self._exchange_numbers(own_numbers)
        digests = {digest for digest, *_ in messages}
        if problem != ("", "") or len(digests) > 1:
            all_words: list[Any] = [(problem, call_in_words)] * self.num_ranks
            if self.num_ranks > 1:
                dist.all_gather_object(all_words, all_words[0], self.group)
            _raise_first(all_words)
        return prepared, [received for _, *received in messages]  # type: ignore[return-value]

    def _exchange_numbers(self, numbers: tuple[int, ...]) -> list[Any]:
        """Collective. Return each rank's numbers; waits for a GPU at most once."""
        if self.num_ranks == 1:
            return [numbers]
        if self.job is not None:
            messages = self.job.all_gather(numbers)
            return [messages[rank] for rank in dist.get_process_group_ranks(self.group)]
        # The host's numbers are sent by the device, where the backend knows no other way.
        device = "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"
        length = self.num_ranks * MESSAGE
        received = torch.empty(length, dtype=torch.long, device=device)
        sent = gpu.on_device_of(received, list(numbers))
        dist.all_gather_into_tensor(received, sent, self.group)
        by_rank = received.view(self.num_ranks, MESSAGE)
        return gpu.HostCopy(by_rank).read()

    def gather_rows(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Collective. Return all ranks' rows, rank after rank. counts: how many each rank has."""
        if self.num_ranks == 1:
            return rows
        longest = max(counts)
        gathered = rows.new_empty(self.num_ranks, longest, *rows.shape[1:])
        dist.all_gather_into_tensor(gathered.flatten(0, 1), _padded(rows, longest), self.group)
        parts = []
        for rank, count in enumerate(counts):
            parts.append(gathered[rank, :count])
        return torch.cat(parts)

    def send_rows(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Collective. Send each rank its rows; return (ranks, rows of this rank, ...)."""
        if self.num_ranks == 1:
            return rows[None]
        longest = max(counts)
        padded = [_padded(part, longest) for part in rows.split(counts)]
        sent = torch.cat(padded)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        by_rank = received.view(self.num_ranks, longest, *rows.shape[1:])
        return by_rank[:, : counts[self.rank]]

    def all_reduce(self, values: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """Collective. Return values reduced over the ranks, in place."""
        if self.num_ranks > 1:
            dist.all_reduce(values, operation, group=self.group)
        return values


def _raise_first(messages: list[Any]) -> None:
    """Raise the first rank's problem, or ConfigError where ranks differ."""
    for rank, (problem, call_in_words) in enumerate(messages):
        kind, text = problem
        if kind:
            raise getattr(errors, kind)(f"{call_in_words[FUNCTION]}: rank {rank}: {text}")
    _, first_call = messages[0]
    for name in first_call:
        values = [call_in_words.get(name, "nothing") for _, call_in_words in messages]
        if len(set(values)) > 1:
            raise ConfigError(
                f"{first_call[FUNCTION]}: {name} differs between ranks: {', '.join(values)}. It "
                "must be the same."
            )


def ranks_of(group: Any, job: Ranks | None = None) -> RankGroup:
    """Return the ranks of a process group; None: the default one, or this process alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return RankGroup()
    return RankGroup(dist.get_rank(group), dist.get_world_size(group), group, job)


def _padded(rows: Tensor, length: int) -> Tensor:
    missing = length - len(rows)
    padding = rows.new_zeros(missing, *rows.shape[1:])
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
        ranks: RankGroup = ctx.ranks
        received = ranks.send_rows(gradient, ctx.counts)
        return received.sum(0), None, None


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
