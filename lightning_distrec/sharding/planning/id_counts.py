"""Counts ids in batches for the planner: how many per example, and what share of a batch's ids is
different."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from lightning_distrec.batches import named_leaves
from lightning_distrec.sharding.planning.constraints import TableConstraints
from lightning_distrec.sharding.tables import Table

MIN_FACTOR = 0.01
"""The planner gets at least this for a feature that hardly any example has, because it divides by
these numbers."""


@dataclass
class IdCount:
    """What was counted of one feature."""

    ids: int = 0
    examples: int = 0
    distinct: int = 0
    """Different ids of each batch, summed."""

    def add(self, ids: int, examples: int, distinct: int) -> None:
        """Count some more."""
        self.ids += ids
        self.examples += examples
        self.distinct += distinct

    def add_ids(self, ids: Tensor, examples: int) -> None:
        """Count the ids of some examples of one batch."""
        self.add(ids.numel(), examples, len(ids.unique()))

    @property
    def factor(self) -> float:
        """Ids per example."""
        return max(MIN_FACTOR, self.ids / self.examples)


@dataclass(frozen=True)
class IdCounts:
    """What was counted in some batches, by the names that things have there."""

    features: dict[str, IdCount] = field(default_factory=dict)
    """Key of a KeyedJaggedTensor, or the name of a JaggedTensor."""
    tensors: dict[str, IdCount] = field(default_factory=dict)
    """Name of a tensor of integers: a key of a dict, or a field of a dataclass or a named tuple."""

    def look_at(self, *batches: Any) -> None:
        """Count the ids in what a batch consists of, each object once: containers and dataclasses
        at any depth."""
        # What sparse_inputs(batch) returns often is a part of the batch, whose ids would otherwise
        # count twice.
        seen: set[int] = set()
        for batch in batches:
            for name, leaf in named_leaves(batch, seen=seen):
                self._count(name, leaf)

    def _count(self, name: str, leaf: Any) -> None:
        if isinstance(leaf, KeyedJaggedTensor):
            # Values lie key after key, so that a split by their lengths gives each key's ids
            # without a copy.
            ids_by_key = leaf.values().split(leaf.length_per_key())
            examples = leaf.stride_per_key()
            for key, ids, num in zip(leaf.keys(), ids_by_key, examples, strict=True):
                self.features.setdefault(key, IdCount()).add_ids(ids, num)
        elif isinstance(leaf, JaggedTensor):
            count = self.features.setdefault(name, IdCount())
            count.add_ids(leaf.values(), len(leaf.lengths()))
        elif isinstance(leaf, Tensor) and leaf.ndim and _has_integers(leaf):
            # Any tensor of integers may hold ids of an nn.Embedding: all are counted, and `factors`
            # picks by name.
            self.tensors.setdefault(name, IdCount()).add_ids(leaf, len(leaf))

    def add(self, counts: "IdCounts") -> None:
        """Take in what another rank has counted."""
        for local, remote in ((self.features, counts.features), (self.tensors, counts.tensors)):
            for name, count in remote.items():
                local.setdefault(name, IdCount()).add(count.ids, count.examples, count.distinct)

    def factors(self, table: Table) -> tuple[float, ...] | None:
        """Return ids per example of each feature of `table`; None where the batches do not show
        those of all.

        An nn.Embedding's or nn.EmbeddingBag's are those of the tensor with its path's name, or the
        last part of that.
        """
        factors = []
        for count in self._feature_counts(table):
            if count is None or not count.examples:
                return None
            factors.append(count.factor)
        return tuple(factors)

    def distinct_share(self, table: Table) -> float | None:
        """Return different ids over ids of a batch, of all features of `table`; None where that is
        not known."""
        counts = [count for count in self._feature_counts(table) if count is not None]
        ids = sum(count.ids for count in counts)
        return sum(count.distinct for count in counts) / ids if ids else None

    def _feature_counts(self, table: Table) -> list[IdCount | None]:
        if table.plain is None:
            return list(map(self.features.get, table.config.feature_names))
        path = table.full_name
        return [self.tensors.get(path) or self.tensors.get(path.rpartition(".")[2])]

    def add_to(
        self, constraints: Mapping[str, TableConstraints], tables: Iterable[Table]
    ) -> dict[str, TableConstraints]:
        """Return the constraints by full name with what was counted; a pooling_factor that the user
        set stays."""
        counted = dict(constraints)
        for table in tables:
            # A pooling_factor of the options comes before them; see torchrec_constraint.
            counted[table.full_name] = replace(
                constraints[table.full_name],
                pooling_factors=self.factors(table),
                distinct_share=self.distinct_share(table),
            )
        return counted


def _has_integers(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
