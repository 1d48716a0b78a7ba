"""Ranks targets among candidates of all ranks, of which each rank holds a slice."""

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distrec.errors import DataError
from lightning_distrec.metrics.candidate_block import CandidateBlock
from lightning_distrec.metrics.ranking import check_ties
from lightning_distrec.metrics.rounds import Rounds, filled, widened


def slice_of_rank(num_candidates: int, group: dist.ProcessGroup | None = None) -> slice:
    """Return this rank's block of candidates; the first `num_candidates % ranks` ranks hold one more.

    Without a process group it is all of them.
    """
    several = dist.is_available() and dist.is_initialized()
    ranks, rank = (dist.get_world_size(group), dist.get_rank(group)) if several else (1, 0)
    size, more = divmod(num_candidates, ranks)
    first = rank * size + min(rank, more)
    return slice(first, first + size + (rank < more))


@torch.no_grad()
def target_ranks(
    queries: Tensor,
    targets: Tensor,
    candidates: Tensor,
    num_candidates: int,
    *,
    ids: Tensor | None = None,
    excluded: Tensor | None = None,
    ties: str = "last",
    max_bytes: int = 2**28,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Collective. Return the rank of each target among the candidates of all ranks: 1 for the highest dot product.

    All ranks call it equally often; how many queries each brings, none included, may differ. Every rank scores all
    ranks' queries against its own candidates, and the counts of those before the targets are added up.

    queries: (queries of this rank, dim). targets: (queries,) or (queries, targets), ids of candidates; -1: none.
    candidates: (candidates of this rank, dim), a slice of them, or on every rank all of them.
    num_candidates: how many there are on all ranks, each counted once.
    ids: (candidates,), distinct and not negative; None: numbered from 0, rank after rank, as `slice_of_rank` has them.
    excluded: (queries, any number), ids that do not count for a query; -1 pads. A target always counts.
    ties: as in `ranks_in_scores`.
    max_bytes: bound of memory for scores; smaller ones need more rounds. Scores are float32, or float64 for such input.
    Returns ranks in the shape of targets, int64; 0 where there is no target.
    Raises, on every rank: ConfigError, shapes do not fit, or a rank's candidates are neither a slice nor all;
        DataError, a target is no candidate, or is one twice.
    """
    check_ties(ties)
    rounds = Rounds.gathered(queries, targets, candidates, num_candidates, ids, excluded, max_bytes, group)
    wanted = targets.reshape(len(targets), rounds.targets)
    left_out = wanted[:, :0] if excluded is None else excluded
    asked = torch.cat([wanted, widened(left_out, rounds.excluded)], dim=1)
    block = CandidateBlock(candidates.to(rounds.dtype), ids, rounds.first_id, rounds.rows_per_block)
    ranks = [wanted[:0]]
    missing = wanted.new_full((2,), -1)
    for mine in rounds:
        vectors = rounds.all_gather(filled(queries[mine].to(rounds.dtype), rounds.queries, 0))
        everybodys = rounds.all_gather(filled(asked[mine], rounds.queries, -1))
        their_targets, their_excluded = everybodys[:, : rounds.targets], everybodys[:, rounds.targets :]
        scores, found = rounds.all_reduce(torch.stack(block.scores_of_targets(vectors, their_targets)))
        before = block.count_before(vectors, their_targets, scores, their_excluded, ties)
        present = their_targets >= 0
        in_order = torch.where(present, rounds.all_reduce(before) + 1, 0)
        ranks.append(rounds.of_this_rank(in_order)[: len(queries[mine])])
        absent = torch.stack([
            torch.where(present & wrong, their_targets, -1).amax() for wrong in (found < 1, found > 1)
        ])
        missing = torch.maximum(missing, absent)
    # Also where all ranks hold all candidates, and each has met its own targets alone.
    absent, twice = rounds.all_reduce_max(missing).tolist()
    if max(absent, twice) >= 0:
        what = f"target {absent} is no candidate" if absent >= 0 else f"target {twice} is a candidate twice"
        raise DataError(
            f"target_ranks: {what}, of {num_candidates} on all ranks. Targets are ids of candidates (ids=...), or "
            "places among them; -1 stands for no target."
        )
    return torch.cat(ranks).view_as(targets)
