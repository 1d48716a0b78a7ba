"""What ids batches have: how many per example, how many different ones, which rows, and how often; for the planner."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from lightning_distrec.sharding.planning.planned_table import TableData
from lightning_distrec.sharding.tables import Table

MIN_FACTOR = 0.01
"""The planner gets at least this for a feature that hardly any example has, because it divides by these numbers."""


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

    @property
    def factor(self) -> float:
        """Ids per example."""
        return max(MIN_FACTOR, self.ids / self.examples)


@dataclass(frozen=True)
class IdCounts:
    """What was counted in some batches, by the names that things have there."""

    features: dict[str, IdCount]
    """Key of a KeyedJaggedTensor, or the name of a JaggedTensor."""
    tensors: dict[str, IdCount]
    """Name of a tensor of integers: a key of a dict, or a field of a dataclass or a named tuple."""

    @staticmethod
    def none() -> "IdCounts":
        """Return counts to begin with."""
        return IdCounts({}, {})

    def look_at(self, *batches: Any) -> None:
        """Count the ids in what a batch consists of, each object once: containers and dataclasses at any depth."""
        for name, leaf in leaves_of(*batches):
            self._count(name, leaf)

    def _count(self, name: str, leaf: Any) -> None:
        if isinstance(leaf, KeyedJaggedTensor):
            of_keys = leaf.values().split(leaf.length_per_key())
            for key, ids, examples in zip(leaf.keys(), of_keys, leaf.stride_per_key(), strict=True):
                self.features.setdefault(key, IdCount()).add(len(ids), examples, len(ids.unique()))
        elif isinstance(leaf, JaggedTensor):
            self.features.setdefault(name, IdCount()).add(
                leaf.values().shape[0], leaf.lengths().shape[0], len(leaf.values().unique())
            )
        elif isinstance(leaf, Tensor) and leaf.ndim and not (leaf.is_floating_point() or leaf.is_complex()):
            self.tensors.setdefault(name, IdCount()).add(leaf.numel(), leaf.shape[0], len(leaf.unique()))

    def add(self, others: "IdCounts") -> None:
        """Take in what another rank has counted."""
        for mine, theirs in ((self.features, others.features), (self.tensors, others.tensors)):
            for name, count in theirs.items():
                mine.setdefault(name, IdCount()).add(count.ids, count.examples, count.distinct)

    def factors_of(self, table: Table) -> tuple[float, ...] | None:
        """Return ids per example of each feature of `table`; None where the batches do not show those of all.

        An nn.Embedding's or nn.EmbeddingBag's are those of the tensor that is called as it is, by its path or the last
        part of that.
        """
        counts = self._of(table)
        known = [count.factor for count in counts if count is not None and count.examples]
        return tuple(known) if len(known) == len(counts) else None

    def distinct_share_of(self, table: Table) -> float | None:
        """Return different ids over ids of a batch, of all features of `table`; None where that is not known."""
        known = [count for count in self._of(table) if count is not None]
        ids = sum(count.ids for count in known)
        return sum(count.distinct for count in known) / ids if ids else None

    def _of(self, table: Table) -> list[IdCount | None]:
        if table.plain is None:
            return [self.features.get(feature) for feature in table.config.feature_names]
        path = table.full_name
        return [self.tensors.get(path) or self.tensors.get(path.rpartition(".")[2])]


def leaves_of(*batches: Any) -> Iterator[tuple[str, Any]]:
    """Yield what batches consist of with its name, as `_leaves` does, each object once."""
    seen: set[int] = set()
    for batch in batches:
        yield from _leaves("", batch, seen)


def _leaves(name: str, value: Any, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield what is in containers and dataclasses, at any depth, with the name that it has in the innermost of them."""
    if id(value) in seen:
        return
    if isinstance(value, (Mapping, list, tuple, Tensor, JaggedTensor, KeyedJaggedTensor)):
        seen.add(id(value))
    inner: list[tuple[str, Any]]
    if isinstance(value, Mapping):
        inner = [(str(key), part) for key, part in value.items()]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        inner = list(zip(value._fields, value, strict=True))
    elif isinstance(value, (list, tuple)):
        inner = [(name, part) for part in value]
    elif is_dataclass(value) and not isinstance(value, type):
        inner = [(field.name, getattr(value, field.name)) for field in fields(value)]
    else:
        yield name, value
        return
    for part_name, part in inner:
        yield from _leaves(part_name, part, seen)


Ids = NDArray[np.int64]


@dataclass
class IdStatistics:
    """The ids of some batches, by the names that things have there; see `IdCounts`."""

    counts: IdCounts = field(default_factory=IdCounts.none)
    num_batches: int = 0
    examples: int | None = None
    """Of the first batch with a KeyedJaggedTensor, or else with ids."""
    features: dict[str, list[Ids]] = field(default_factory=dict)
    """Name -> the ids of each batch."""
    tensors: dict[str, list[Ids]] = field(default_factory=dict)

    def look_at(self, *batches: Any) -> None:
        """Take in a batch, and what the step computes of it."""
        self.num_batches += 1
        self.counts.look_at(*batches)
        for name, leaf in leaves_of(*batches):
            self._keep(name, leaf)

    def _keep(self, name: str, leaf: Any) -> None:
        if isinstance(leaf, KeyedJaggedTensor):
            self.examples = self.examples or int(leaf.stride())
            for key, jagged in leaf.to_dict().items():
                self.features.setdefault(key, []).append(_ids(jagged.values()))
        elif isinstance(leaf, JaggedTensor):
            self.features.setdefault(name, []).append(_ids(leaf.values()))
        elif isinstance(leaf, Tensor) and leaf.ndim and not (leaf.is_floating_point() or leaf.is_complex()):
            self.examples = self.examples or leaf.shape[0]
            self.tensors.setdefault(name, []).append(_ids(leaf))

    def of(self, table: Table) -> TableData | None:
        """Return what they show of a table; None where they do not have the ids of all its features."""
        factors = self.counts.factors_of(table)
        if factors is None:
            return None
        if table.plain is None:
            kept = [self.features[feature] for feature in table.config.feature_names]
        else:
            path = table.full_name
            kept = [self.tensors.get(path) or self.tensors[path.rpartition(".")[2]]]
        batches = [np.concatenate(of_batch) for of_batch in zip(*kept, strict=True)]
        return _summed_up(batches, factors)


def _ids(values: Tensor) -> Ids:
    ids: Ids = values.detach().cpu().reshape(-1).numpy().astype(np.int64)
    return ids


def _summed_up(batches: Iterable[Ids], factors: tuple[float, ...]) -> TableData | None:
    batches = list(batches)
    every = np.concatenate(batches)
    if not len(every):
        return None
    rows, times = np.unique(every, return_counts=True)
    falling = np.sort(times)[::-1]
    return TableData(
        num_batches=len(batches),
        ids_per_example=factors,
        ids_per_batch=len(every) / len(batches),
        distinct_per_batch=float(np.mean([len(np.unique(batch)) for batch in batches])),
        distinct=len(rows),
        rows_for_half=int(np.searchsorted(falling.cumsum(), len(every) / 2)) + 1,
        hottest_share=float(falling[0] / len(every)),
    )
