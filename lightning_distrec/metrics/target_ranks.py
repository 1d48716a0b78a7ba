"""The rank of each target among candidates: by scores on this rank, or by vectors of which each
rank holds a slice."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lightning_distrec.errors import ConfigError, DataError


@torch.no_grad()
def ranks_in_scores(scores: Tensor, targets: Tensor, excluded: Tensor | None = None) -> Tensor:
    """Return the rank of each target among all candidates: 1 for the highest score.

    scores: (queries, candidates). targets: (queries,) or (queries, targets), indices of candidates;
    -1: no target here.
    excluded: (queries, any number), indices of candidates that do not count, such as those already
    seen; -1 pads.
        A target counts, even if it is excluded as well.
    Returns ranks in the shape of targets, int64; 0 where there is no target. A target stands behind
    all candidates of
        its score, so that a model which scores everything alike gets the worst rank. A NaN is a
        lowest score.
    Raises ConfigError: shapes do not fit. An index beyond the candidates is torch's error.
    """
    if scores.ndim != 2 or targets.ndim not in (1, 2) or len(targets) != len(scores):
        raise ConfigError(
            f"scores {tuple(scores.shape)} and targets {tuple(targets.shape)} do not fit: scores "
            "are (queries, candidates), targets (queries,) or (queries, targets)."
        )
    columns = targets if targets.ndim == 2 else targets[:, None]
    values = without_nan(scores)
    target_scores = values.gather(1, columns.clamp_min(0))
    num_better = count_before(mask_excluded(values, columns, excluded), target_scores, columns)
    return torch.where(columns >= 0, num_better + 1, 0).view_as(targets)


def without_nan(scores: Tensor) -> Tensor:
    """Return scores with NaN as the lowest; a NaN that compares with nothing would get a target the
    first rank."""
    return torch.nan_to_num(scores, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def mask_excluded(scores: Tensor, targets: Tensor, excluded: Tensor | None) -> Tensor:
    """Return scores in which excluded candidates are NaN, which is neither above nor equal to
    anything.

    targets, excluded: (queries, any number), columns of scores; negative ones are none.
    """
    if excluded is None or not excluded.numel() or not scores.numel():
        return scores
    # A column more takes what is no column: its value is not looked at again.
    padded = functional.pad(scores, (0, 1))
    spare = scores.shape[1]
    target_columns = torch.where(targets >= 0, targets, spare)
    target_scores = padded.gather(1, target_columns)
    padded.scatter_(1, torch.where(excluded >= 0, excluded, spare), torch.nan)
    return padded.scatter_(1, target_columns, target_scores)[:, :spare]


def count_before(scores: Tensor, target_scores: Tensor, columns: Tensor) -> Tensor:
    """Return how many of these candidates stand before each target, (queries, targets), those of
    its score included.

    columns: of the targets in scores, negative where they are not among these candidates.
    """
    counts = [(scores >= score[:, None]).sum(1) for score in target_scores.unbind(1)]
    # The target equals itself.
    return torch.stack(counts, dim=1) - (columns >= 0).long()


class CandidateBlock:
    """This rank's candidates.

    vectors: (candidates, dim). ids: (candidates,), or None: numbered from first_id.
    rows_per_block: candidates that are scored at a time.
    """

    def __init__(
        self, vectors: Tensor, ids: Tensor | None, first_id: int, rows_per_block: int
    ) -> None:
        if ids is None:
            ids = torch.arange(first_id, first_id + len(vectors), device=vectors.device)
        self._vectors = vectors
        self._rows = rows_per_block
        self._sorted, self._order = torch.sort(ids)
        self._latest_scores: Tensor | None = None
        """Scores of the latest queries, where one block holds all candidates."""

    def scores_of_targets(self, queries: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of those targets that are here, else 0; and 1 where they are here, else
        0."""
        self._latest_scores = None
        columns = self._columns(targets)
        counts = torch.zeros_like(targets, dtype=queries.dtype)
        scores = torch.zeros_like(counts)
        for first, values in self._blocks(queries):
            block_columns = _relative(columns, first, values.shape[1])
            is_inside = block_columns >= 0
            scores = torch.where(is_inside, values.gather(1, block_columns.clamp_min(0)), scores)
            counts += is_inside
        return scores, counts

    def count_before(
        self, queries: Tensor, targets: Tensor, scores: Tensor, excluded: Tensor
    ) -> Tensor:
        """Return how many candidates here stand before each target, int64; after
        `scores_of_targets` of the same."""
        columns = self._columns(targets)
        left_out = self._columns(excluded)
        counts = torch.zeros_like(targets)
        for first, values in self._blocks(queries):
            target_columns = _relative(columns, first, values.shape[1])
            values = mask_excluded(
                values, target_columns, _relative(left_out, first, values.shape[1])
            )
            counts += count_before(values, scores, target_columns)
        self._latest_scores = None
        return counts

    def _blocks(self, queries: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each block's first column, and its scores: (queries, columns), the same bits each
        time."""
        for first in range(0, len(self._vectors), self._rows):
            if self._latest_scores is not None:
                yield first, self._latest_scores
                continue
            # In full precision: both passes over a block must have the same bits, or a target would
            # not equal itself.
            with torch.autocast(queries.device.type, enabled=False):
                values = without_nan(queries @ self._vectors[first : first + self._rows].T)
            self._latest_scores = values if self._rows >= len(self._vectors) else None
            yield first, values

    def _columns(self, ids: Tensor) -> Tensor:
        """Return the columns of ids, -1 where they are not here."""
        if not len(self._sorted):
            return torch.full_like(ids, -1)
        places = torch.searchsorted(self._sorted, ids.contiguous()).clamp_max(len(self._sorted) - 1)
        return torch.where(self._sorted[places] == ids, self._order[places], -1)


def _relative(columns: Tensor, first: int, length: int) -> Tensor:
    """Return the places of columns in a block; -1 for those outside of it."""
    return torch.where((columns >= first) & (columns < first + length), columns - first, -1)


# Tensors of the size of the scores that exist at a time, masks among them.
COPIES = 4


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """What all ranks know of a call. Iterating yields this rank's queries of each round, as a
    slice, maybe empty."""

    ranks: int
    """Ranks that exchange queries; 1 where every rank has all candidates."""
    rank: int
    count: int
    queries: int
    """Queries of each rank in a round."""
    targets: int
    """Width of targets, and of excluded ids."""
    excluded: int
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
        excluded: Tensor,
        max_bytes: int,
        group: dist.ProcessGroup | None,
    ) -> "Rounds":
        """Collective. Exchange shapes. Raises ConfigError on every rank: those of a rank do not
        fit."""
        problem = _problem_of(
            queries, targets, candidates, num_candidates, ids, excluded, max_bytes
        )
        dtype = torch.promote_types(queries.dtype, candidates.dtype)
        dtype = torch.promote_types(dtype, torch.float32)
        equal = {
            "num_candidates": num_candidates,
            "max_bytes": max_bytes,
            "dim": candidates.shape[-1],
            "targets per query": targets.shape[1:].numel(),
            "dtype": dtype,
        }
        headers = [(problem, equal, len(queries), len(candidates), excluded.shape[-1])]
        rank = 0
        if dist.is_available() and dist.is_initialized():
            rank = dist.get_rank(group)
            headers *= dist.get_world_size(group)
            dist.all_gather_object(headers, headers[0], group)
        problems, equal_values, num_queries, held, excluded_widths = zip(*headers, strict=True)
        for number, other_problem in enumerate(problems):
            if other_problem:
                raise ConfigError(f"target_ranks: rank {number}: {other_problem}")
        for name in equal:
            values = [other[name] for other in equal_values]
            if any(value != values[0] for value in values):
                raise ConfigError(
                    f"target_ranks: {name} differs between ranks: {values}. It must be the same."
                )
        if set(held) == {num_candidates}:
            num_queries = num_queries[rank : rank + 1]
            held = held[:1]
            rank = 0
            first_id = 0
        elif sum(held) == num_candidates:
            first_id = sum(held[:rank])
        else:
            raise ConfigError(
                f"target_ranks: ranks hold {list(held)} candidates: neither slices of "
                f"num_candidates={num_candidates}, nor all of them on every rank. Pass "
                "candidates[slice_of_rank(num_candidates)]."
            )
        bytes_per_score = COPIES * dtype.itemsize
        # Rounds are as many on every rank, also where a rank has fewer queries: each round is a
        # collective.
        size = max(
            1, min(max(num_queries), max_bytes // (bytes_per_score * len(held) * max(1, *held, 1)))
        )
        return cls(
            ranks=len(held),
            rank=rank,
            count=math.ceil(max(num_queries) / size),
            queries=size,
            targets=targets.shape[1:].numel(),
            excluded=max(excluded_widths),
            first_id=first_id,
            rows_per_block=max(1, max_bytes // (bytes_per_score * len(held) * size)),
            dtype=dtype,
            group=group,
        )

    def __iter__(self) -> Iterator[slice]:
        return (
            slice(number * self.queries, (number + 1) * self.queries)
            for number in range(self.count)
        )

    def all_gather(self, rows: Tensor) -> Tensor:
        """Collective. Return all ranks' rows, rank after rank."""
        if self.ranks == 1:
            return rows
        gathered = rows.new_empty(self.ranks * len(rows), *rows.shape[1:])
        dist.all_gather_into_tensor(gathered, rows, group=self.group)
        return gathered

    def all_reduce(self, values: Tensor) -> Tensor:
        """Collective. Return the sums over all ranks, in place."""
        if self.ranks > 1:
            dist.all_reduce(values, group=self.group)
        return values


def filled(rows: Tensor, length: int, value: int) -> Tensor:
    """Return rows with further ones of `value` below, `length` in all."""
    return functional.pad(rows, (0, 0, 0, length - len(rows)), value=value).contiguous()


def _problem_of(
    queries: Tensor,
    targets: Tensor,
    candidates: Tensor,
    num_candidates: int,
    ids: Tensor | None,
    excluded: Tensor,
    max_bytes: int,
) -> str:
    """Return what is wrong with this rank's arguments."""
    shapes = f"queries {tuple(queries.shape)} and candidates {tuple(candidates.shape)}"
    if queries.ndim != 2 or candidates.ndim != 2 or queries.shape[1] != candidates.shape[1]:
        return f"{shapes} must be (number, the same dim)."
    if targets.ndim not in (1, 2) or len(targets) != len(queries) or targets.dtype != torch.int64:
        return (
            f"targets {tuple(targets.shape)} of {targets.dtype} must be int64, one row for each "
            "query."
        )
    if excluded.ndim != 2 or len(excluded) != len(queries) or excluded.dtype != torch.int64:
        return (
            f"excluded {tuple(excluded.shape)} of {excluded.dtype} must be int64, ({len(queries)}, "
            "any number)."
        )
    if ids is not None and (ids.shape != candidates.shape[:1] or ids.dtype != torch.int64):
        return (
            f"ids {tuple(ids.shape)} of {ids.dtype} must be int64, ({len(candidates)},), one for "
            "each candidate."
        )
    if ids is not None and (len(ids.unique()) < len(ids) or (len(ids) and int(ids.min()) < 0)):
        return "ids must be distinct and not negative."
    if num_candidates < 1 or max_bytes < 1:
        return f"num_candidates={num_candidates} and max_bytes={max_bytes} must be at least 1."
    return ""


def slice_of_rank(num_candidates: int, group: dist.ProcessGroup | None = None) -> slice:
    """Return this rank's block of candidates; the first `num_candidates % ranks` ranks hold one
    more.

    Without a process group it is all of them.
    """
    several = dist.is_available() and dist.is_initialized()
    ranks, rank = (dist.get_world_size(group), dist.get_rank(group)) if several else (1, 0)
    size, remainder = divmod(num_candidates, ranks)
    first = rank * size + min(rank, remainder)
    return slice(first, first + size + (rank < remainder))


@torch.no_grad()
def target_ranks(
    queries: Tensor,
    targets: Tensor,
    candidates: Tensor,
    num_candidates: int,
    *,
    ids: Tensor | None = None,
    excluded: Tensor | None = None,
    max_bytes: int = 2**28,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Collective. Return the rank of each target among the candidates of all ranks: 1 for the
    highest dot product.

    All ranks call it equally often; how many queries each brings, none included, may differ. Every
    rank scores all ranks' queries against its own candidates, and the counts of those before the
    targets are added up.

    queries: (queries of this rank, dim). targets: (queries,) or (queries, targets), ids of
    candidates; -1: none.
    candidates: (candidates of this rank, dim), a slice of them, or on every rank all of them.
    num_candidates: how many there are on all ranks, each counted once.
    ids: (candidates,), distinct and not negative; None: numbered from 0, rank after rank, as
    `slice_of_rank` has them.
    excluded: (queries, any number), ids that do not count for a query; -1 pads. A target always
    counts.
    max_bytes: bound of memory for scores; smaller ones need more rounds. Scores are float32, or
    float64 for such input. Returns ranks in the shape of targets, int64; 0 where there is no
    target.
    Raises, on every rank: ConfigError, shapes do not fit, or a rank's candidates are neither a
    slice nor all;
        DataError, a target is no candidate, or is one twice.
    """
    if excluded is None:
        excluded = torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
    rounds = Rounds.gathered(
        queries, targets, candidates, num_candidates, ids, excluded, max_bytes, group
    )
    local_targets = targets.reshape(len(targets), rounds.targets)
    padding = (0, rounds.excluded - excluded.shape[1])
    local_excluded = functional.pad(excluded, padding, value=-1)
    local_ids = torch.cat([local_targets, local_excluded], dim=1)
    block = CandidateBlock(candidates.to(rounds.dtype), ids, rounds.first_id, rounds.rows_per_block)
    ranks = [local_targets[:0]]
    missing = local_targets.new_full((2,), -1)
    for round_queries in rounds:
        vectors = rounds.all_gather(
            filled(queries[round_queries].to(rounds.dtype), rounds.queries, 0)
        )
        gathered_ids = rounds.all_gather(filled(local_ids[round_queries], rounds.queries, -1))
        all_targets = gathered_ids[:, : rounds.targets]
        all_excluded = gathered_ids[:, rounds.targets :]
        scores, num_holders = rounds.all_reduce(
            torch.stack(block.scores_of_targets(vectors, all_targets))
        )
        num_better = block.count_before(vectors, all_targets, scores, all_excluded)
        present = all_targets >= 0
        in_order = torch.where(present, rounds.all_reduce(num_better) + 1, 0)
        first = rounds.rank * rounds.queries
        ranks.append(in_order[first : first + len(queries[round_queries])])
        absent = torch.stack([
            torch.where(present & wrong, all_targets, -1).amax()
            for wrong in (num_holders < 1, num_holders > 1)
        ])
        missing = torch.maximum(missing, absent)
    # Also where all ranks hold all candidates, and each has met its own targets alone.
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(missing, dist.ReduceOp.MAX, group=group)
    absent, twice = missing.tolist()
    if max(absent, twice) >= 0:
        problem = (
            f"target {absent} is no candidate"
            if absent >= 0
            else (f"target {twice} is a candidate twice")
        )
        raise DataError(
            f"target_ranks: {problem}, of {num_candidates} on all ranks. Targets are ids of "
            "candidates (ids=...), or places among them; -1 stands for no target."
        )
    return torch.cat(ranks).view_as(targets)
