"""Looks at the ids of batches: which rows they look up, and how often."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from lightning_distrec.sharding.plan.table_data import TableData
from lightning_distrec.sharding.planning.id_counts import IdCounts, leaves_of
from lightning_distrec.sharding.tables import Table

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
