"""What each rank reports once in the process group's store, where a rank reads all of it without waiting for others."""

import json
from itertools import count
from typing import Any

import torch.distributed as dist

from lightning_distrec._compat.torch import default_store

_numbers = count()
"""Ranks make their reports in one order, so that these are alike on all."""


class RankReports:
    """One report of each rank: plain values."""

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        # A key is set without waiting for any rank, as a collective would.
        self._store = default_store() if several else dist.HashStore()
        number = next(_numbers)
        self._keys = [f"lightning_distrec/reports/{number}/{rank}" for rank in range(num_ranks)]

    def put(self, report: Any) -> None:
        """Leave this rank's report."""
        self._store.set(self._keys[self._rank], json.dumps(report))

    def take(self) -> list[Any] | None:
        """Return all reports in the order of the ranks, and remove them, on one rank; None until all are there."""
        if not self._store.check(self._keys):
            return None
        reports = [json.loads(self._store.get(key)) for key in self._keys]
        for key in self._keys:
            self._store.delete_key(key)
        return reports
