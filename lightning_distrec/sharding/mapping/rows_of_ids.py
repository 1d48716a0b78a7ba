"""What every mapping of ids to rows on one rank has, however it chooses rows."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_distrec.sharding.mapping.spec import MappingSpec


@dataclass
class MappingCounts:
    """What has happened on this rank since the start of the run."""

    looked_up: int = 0
    """Ids that were looked up in training."""
    shared: int = 0
    """Those of them that had no row of their own."""
    evicted: int = 0
    """Rows that were taken from an id."""


class RowsOfIds(ABC):
    """The buckets of one rank.

    first_bucket, num_buckets: those that the rank owns.
    """

    ids: Tensor
    """The id that has each row, (num_rows, 1)."""

    def __init__(self, spec: MappingSpec, first_bucket: int, num_buckets: int) -> None:
        self.spec = spec
        self.first_row, self.num_rows = first_bucket * spec.bucket_rows, num_buckets * spec.bucket_rows
        self.counts = MappingCounts()
        self.initial_rows = torch.empty(0, 0)
        """What a row starts from when an id gets another's, alike on all ranks."""
        self.now = 0
        """Counts the lookups in training."""
        self._first_bucket = first_bucket

    @abstractmethod
    def learn(self, ids: Tensor, ttl_hours: Tensor | None = None) -> Tensor:
        """Let new ids have rows, and note the use of the others. Return the rows that an id was evicted from.

        ttl_hours: of each id, where features have their own.
        """

    @abstractmethod
    def find(self, ids: Tensor) -> Tensor:
        """Return the rows of `ids`, (num_ids,) each, counted from this rank's first one; -1: it is to be left out."""

    @abstractmethod
    def optimizer_stepped(self) -> None:
        """The rows that were used so far may be evicted from now on."""

    @property
    @abstractmethod
    def num_taken(self) -> int:
        """How many rows an id has."""

    @property
    def changes_ids(self) -> bool:
        """Whether ids are not sent as they are."""
        return False

    def sent(self, ids: Tensor) -> Tensor:
        """Return ids, (num_ids,), as they are sent to the rank that owns their bucket."""
        return ids

    def _bucket_of(self, ids: Tensor) -> Tensor:
        """Return the buckets of ids, (num_ids,) each, counted from this rank's first one."""
        return bucket_of(self.spec, ids) - self._first_bucket


def bucket_of(spec: MappingSpec, ids: Tensor) -> Tensor:
    """Return the buckets of ids, (num_ids,) each."""
    return ids // -(-spec.num_ids // spec.num_buckets) if spec.num_ids else ids % spec.num_buckets
