"""Scores queries against this rank's candidates, in blocks."""

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_distrec.metrics.ranking import count_before, mask_excluded, without_nan


class CandidateBlock:
    """This rank's candidates.

    vectors: (candidates, dim). ids: (candidates,), or None: numbered from first_id.
    rows_per_block: candidates that are scored at a time.
    """

    def __init__(self, vectors: Tensor, ids: Tensor | None, first_id: int, rows_per_block: int) -> None:
        if ids is None:
            ids = torch.arange(first_id, first_id + len(vectors), device=vectors.device)
        self._vectors, self._ids, self._rows = vectors, ids, rows_per_block
        self._sorted, self._order = torch.sort(ids)
        self._kept: Tensor | None = None
        """Scores of the latest queries, where one block holds all candidates."""

    def scores_of_targets(self, queries: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of those targets that are here, else 0; and 1 where they are here, else 0."""
        self._kept = None
        columns = self._columns(targets)
        found = torch.zeros_like(targets, dtype=queries.dtype)
        scores = torch.zeros_like(found)
        for first, values in self._blocks(queries):
            here, inside = _inside(columns, first, values.shape[1])
            scores = torch.where(here, values.gather(1, inside), scores)
            found += here
        return scores, found

    def count_before(self, queries: Tensor, targets: Tensor, scores: Tensor, excluded: Tensor, ties: str) -> Tensor:
        """Return how many candidates here stand before each target, int64; after `scores_of_targets` of the same."""
        columns, left_out = self._columns(targets), self._columns(excluded)
        counts = torch.zeros_like(targets)
        for first, values in self._blocks(queries):
            at = _relative(columns, first, values.shape[1])
            values = mask_excluded(values, at, _relative(left_out, first, values.shape[1]))
            places = self._ids[first : first + values.shape[1]]
            counts += count_before(values, scores, at, ties, targets, places)
        self._kept = None
        return counts

    def _blocks(self, queries: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each block's first column, and its scores: (queries, columns), the same bits each time."""
        for first in range(0, len(self._vectors), self._rows):
            if self._kept is not None:
                yield first, self._kept
                continue
            with torch.autocast(queries.device.type, enabled=False):
                values = without_nan(queries @ self._vectors[first : first + self._rows].T)
            self._kept = values if self._rows >= len(self._vectors) else None
            yield first, values

    def _columns(self, ids: Tensor) -> Tensor:
        """Return the columns of ids, -1 where they are not here."""
        if not len(self._sorted):
            return torch.full_like(ids, -1)
        at = torch.searchsorted(self._sorted, ids.contiguous()).clamp_max(len(self._sorted) - 1)
        return torch.where(self._sorted[at] == ids, self._order[at], -1)


def _inside(columns: Tensor, first: int, length: int) -> tuple[Tensor, Tensor]:
    """Return which columns are in a block, and their places in it; 0 for others."""
    at = _relative(columns, first, length)
    return at >= 0, at.clamp_min(0)


def _relative(columns: Tensor, first: int, length: int) -> Tensor:
    return torch.where((columns >= first) & (columns < first + length), columns - first, -1)
