"""The rounds in which ranks exchange queries: as many on every rank, whatever each one brings."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lightning_distrec.errors import ConfigError

COPIES = 4
"""Tensors of the size of the scores that exist at a time, masks among them."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """What all ranks know of a call. Iterating yields this rank's queries of each round, as a slice, maybe empty."""

    ranks: int
    """Ranks that exchange queries; 1 where every rank has all candidates."""
    rank: int
    count: int
    queries: int
    """Queries of each rank in a round."""
    targets: int
    excluded: int
    """Width of targets, and of excluded ids."""
    first_id: int
    rows_per_block: int
    dtype: torch.dtype
    group: dist.ProcessGroup | None

    @classmethod
    def gathered(
        cls,
        queries: Tensor,
        targets: Tensor,
        candidates: Tensor,
        num_candidates: int,
        ids: Tensor | None,
        excluded: Tensor | None,
        max_bytes: int,
        group: dist.ProcessGroup | None,
    ) -> "Rounds":
        """Collective. Exchange shapes. Raises ConfigError on every rank: those of a rank do not fit."""
        problem = _problem_of(queries, targets, candidates, num_candidates, ids, excluded, max_bytes)
        is_double = torch.float64 in (queries.dtype, candidates.dtype)
        width = 1 if targets.ndim < 2 else targets.shape[1]
        width_excluded = 0 if excluded is None or excluded.ndim < 2 else excluded.shape[1]
        mine = [bool(problem), len(queries), len(candidates), num_candidates, max_bytes]
        mine += [candidates.shape[-1], width, is_double, width_excluded]
        header = torch.tensor(mine, device=candidates.device)
        everybodys = torch.stack(_all_gather(header, group)).tolist()
        problems, num_queries, held, *same, excluded_widths = map(list, zip(*everybodys, strict=True))
        rank = dist.get_rank(group) if len(held) > 1 else 0
        if problem:
            raise ConfigError(f"target_ranks: {problem}")
        if any(problems):
            raise ConfigError(
                f"target_ranks: arguments of rank {problems.index(1)} do not fit; its own error says why."
            )
        for what, values in zip(
            ("num_candidates", "max_bytes", "dim", "targets per query", "dtype"), same, strict=True
        ):
            if len(set(values)) > 1:
                raise ConfigError(f"target_ranks: {what} differs between ranks: {values}. It must be the same.")
        if set(held) == {num_candidates}:
            num_queries, held, rank, first_id = num_queries[rank : rank + 1], held[:1], 0, 0
        elif sum(held) == num_candidates:
            first_id = sum(held[:rank])
        else:
            raise ConfigError(
                f"target_ranks: ranks hold {held} candidates: neither slices of num_candidates={num_candidates}, nor "
                "all of them on every rank. Pass candidates[slice_of_rank(num_candidates)]."
            )
        bytes_per_score = COPIES * (8 if is_double else 4)
        size = max(1, min(max(num_queries), max_bytes // (bytes_per_score * len(held) * max(1, *held, 1))))
        return cls(
            ranks=len(held),
            rank=rank,
            count=math.ceil(max(num_queries) / size),
            queries=size,
            targets=width,
            excluded=max(excluded_widths),
            first_id=first_id,
            rows_per_block=max(1, max_bytes // (bytes_per_score * len(held) * size)),
            dtype=torch.float64 if is_double else torch.float32,
            group=group,
        )

    def __iter__(self) -> Iterator[slice]:
        return (slice(number * self.queries, (number + 1) * self.queries) for number in range(self.count))

    def all_gather(self, rows: Tensor) -> Tensor:
        """Collective. Return all ranks' rows, rank after rank."""
        return rows if self.ranks == 1 else torch.cat(_all_gather(rows, self.group))

    def all_reduce(self, values: Tensor) -> Tensor:
        """Collective. Return the sums over all ranks, in place."""
        if self.ranks > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """Collective. Return the maxima over all ranks, in place, also where each works by itself."""
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self.group)
        return values

    def of_this_rank(self, rows: Tensor) -> Tensor:
        """Return this rank's part of what `all_gather` has joined."""
        return rows[self.rank * self.queries : (self.rank + 1) * self.queries]


def filled(rows: Tensor, length: int, value: int) -> Tensor:
    """Return rows with further ones of `value` below, `length` in all."""
    return functional.pad(rows, (0, 0, 0, length - len(rows)), value=value).contiguous()


def widened(ids: Tensor, width: int) -> Tensor:
    """Return ids with further columns of -1."""
    return functional.pad(ids, (0, width - ids.shape[1]), value=-1)


def _all_gather(tensor: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    if not (dist.is_available() and dist.is_initialized()):
        return [tensor]
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def _problem_of(
    queries: Tensor,
    targets: Tensor,
    candidates: Tensor,
    num_candidates: int,
    ids: Tensor | None,
    excluded: Tensor | None,
    max_bytes: int,
) -> str:
    """Return what is wrong with this rank's arguments; the others learn that something is."""
    if queries.ndim != 2 or candidates.ndim != 2 or queries.shape[1] != candidates.shape[1]:
        return (
            f"queries {tuple(queries.shape)} and candidates {tuple(candidates.shape)} must be (number, the same dim)."
        )
    if targets.ndim not in (1, 2) or len(targets) != len(queries) or targets.dtype != torch.int64:
        return (
            f"targets {tuple(targets.shape)} of {targets.dtype} must be int64, ({len(queries)},) or ({len(queries)}, "
            "targets), one row for each query."
        )
    if excluded is not None and (excluded.ndim != 2 or len(excluded) != len(queries) or excluded.dtype != torch.int64):
        return f"excluded {tuple(excluded.shape)} of {excluded.dtype} must be int64, ({len(queries)}, any number)."
    if ids is not None and (ids.shape != candidates.shape[:1] or ids.dtype != torch.int64):
        return f"ids {tuple(ids.shape)} of {ids.dtype} must be int64, ({len(candidates)},), one for each candidate."
    if ids is not None and (len(ids.unique()) < len(ids) or (len(ids) and int(ids.min()) < 0)):
        return "ids must be distinct and not negative."
    if num_candidates < 1 or max_bytes < 1:
        return f"num_candidates={num_candidates} and max_bytes={max_bytes} must be at least 1."
    return ""
