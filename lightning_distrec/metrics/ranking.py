"""Ranks targets among candidates by a matrix of scores that is on this rank."""

import torch
from torch import Tensor

from lightning_distrec.errors import ConfigError

TIES = ("last", "first", "id")


@torch.no_grad()
def ranks_in_scores(scores: Tensor, targets: Tensor, excluded: Tensor | None = None, ties: str = "last") -> Tensor:
    """Return the rank of each target among all candidates: 1 for the highest score.

    scores: (queries, candidates). targets: (queries,) or (queries, targets), indices of candidates; -1: no target here.
    excluded: (queries, any number), indices of candidates that do not count, such as those already seen; -1 pads.
        A target counts, even if it is excluded as well.
    ties: where a target stands among candidates of its score. "last": behind all of them, so that a model which scores
        everything alike gets the worst rank; "first": before them; "id": ordered by index, as a stable sort does.
    Returns ranks in the shape of targets, int64; 0 where there is no target. A score that is NaN is a lowest one.
    Raises ConfigError: shapes or ties do not fit. An index beyond the candidates is torch's error.
    """
    check_ties(ties)
    if scores.ndim != 2 or targets.ndim not in (1, 2) or len(targets) != len(scores):
        raise ConfigError(
            f"scores {tuple(scores.shape)} and targets {tuple(targets.shape)} do not fit: scores are (queries, "
            "candidates), targets (queries,) or (queries, targets)."
        )
    columns = targets if targets.ndim == 2 else targets[:, None]
    values = without_nan(scores)
    wanted = values.gather(1, columns.clamp_min(0))
    places = torch.arange(scores.shape[1], device=scores.device)
    before = count_before(mask_excluded(values, columns, excluded), wanted, columns, ties, columns, places)
    return torch.where(columns >= 0, before + 1, 0).view_as(targets)


def check_ties(ties: str) -> None:
    """Raise ConfigError for an unknown rule."""
    if ties not in TIES:
        raise ConfigError(f"ties={ties!r} is unknown. Set one of {', '.join(map(repr, TIES))}.")


def without_nan(scores: Tensor) -> Tensor:
    """Return scores with NaN as the lowest; a NaN that compares with nothing would get a target the first rank."""
    return torch.nan_to_num(scores, nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def mask_excluded(scores: Tensor, targets: Tensor, excluded: Tensor | None) -> Tensor:
    """Return scores in which excluded candidates are NaN, which is neither above nor equal to anything.

    targets, excluded: (queries, any number), columns of scores; negative ones are none.
    """
    if excluded is None or not excluded.numel() or not scores.numel():
        return scores
    # A column more takes what is no column: its value is not looked at again.
    padded = torch.nn.functional.pad(scores, (0, 1))
    spare = scores.shape[1]
    there = torch.where(targets >= 0, targets, spare)
    kept = padded.gather(1, there)
    padded.scatter_(1, torch.where(excluded >= 0, excluded, spare), torch.nan)
    return padded.scatter_(1, there, kept)[:, :spare]


def count_before(scores: Tensor, wanted: Tensor, columns: Tensor, ties: str, ids: Tensor, places: Tensor) -> Tensor:
    """Return how many of these candidates stand before each target, (queries, targets).

    wanted: the targets' scores. columns: their columns of scores, negative where they are not among these candidates.
    ids: the targets' ids. places: (candidates,), the ids of these candidates.
    """
    counts = []
    for score, column, id_ in zip(wanted.unbind(1), columns.unbind(1), ids.unbind(1), strict=True):
        if ties == "last":
            # The target equals itself.
            count = (scores >= score[:, None]).sum(1) - (column >= 0).long()
        else:
            before = scores > score[:, None]
            if ties == "id":
                before |= (scores == score[:, None]) & (places < id_[:, None])
            count = before.sum(1)
        counts.append(count)
    return torch.stack(counts, dim=1)
