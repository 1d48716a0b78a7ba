"""Checks ids before they are sent: an id outside of its table must not look up another row.

FBGEMM checks bounds in its kernels, but by then row-wise sharding has already mapped an id that is too large to some
rank's shard, and the kernel sees a valid row of the wrong id. So the check runs on the rank that has the batch, and the
ranks agree on the result (lookup_consensus.py).
"""

import warnings
from typing import Literal

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_distrec.errors import ConfigError, IdsError
from lightning_distrec.ranks import Ranks
from lightning_distrec.sharding.lookup.jagged import with_ids
from lightning_distrec.sharding.tables import Table, smallest_tables

CheckIds = Literal["error", "warn", "ignore"]
CHECK_IDS: tuple[str, ...] = ("error", "warn", "ignore")


def check_check_ids(value: str) -> None:
    """Raise ConfigError unless `value` is a known way to treat ids that are out of range."""
    if value not in CHECK_IDS:
        raise ConfigError(f"check_ids={value!r} is not known. Use one of {', '.join(CHECK_IDS)}.")


class IdsCheck:
    """The check of one collection's ids.

    tables: the collection's tables. mode: "error" raises on every rank; "warn" warns once and looks up row 0 in
    place of the id, as FBGEMM does; "ignore" looks up row 0 without a warning.
    A feature that several tables look up must be in range of the smallest of them.
    """

    def __init__(self, tables: list[Table], mode: CheckIds, ranks: Ranks) -> None:
        self._mode = mode
        self.ranks = ranks
        self._warned = False
        self._table_of_feature = smallest_tables(tables)
        self._limits = {feature: table.num_ids for feature, table in self._table_of_feature.items()}

    def check(
        self, features: KeyedJaggedTensor, smallest: int, largest: int
    ) -> tuple[KeyedJaggedTensor, IdsError | None]:
        """Return the features with every id in range, and the error for all ranks to raise, if any.

        smallest, largest: of all ids, those of features that are not looked up among them.
        """
        bad = self._out_of_range(features, smallest, largest)
        if bad is None:
            return features, None
        problem = self._describe(features, bad)
        features = with_ids(features, features.values().masked_fill(bad, 0))
        if self._mode == "error":
            return features, IdsError(problem)
        if self._mode == "warn" and not self._warned:
            self._warned = True
            # Not on rank zero only: this rank has the ids.
            warnings.warn(f"{problem} Row 0 is looked up in their place. This is reported once.", stacklevel=2)
        return features, None

    def _out_of_range(self, features: KeyedJaggedTensor, smallest: int, largest: int) -> torch.Tensor | None:
        """Return which ids, (num_ids,), are out of range; None where none is."""
        values = features.values()
        keys = features.keys()
        limits = [self._limits[key] for key in keys]
        if smallest >= 0 and largest < min(limits):
            return None
        counts = torch.tensor(features.length_per_key(), device=values.device)
        limit_of_id = torch.tensor(limits, device=values.device).repeat_interleave(counts, output_size=values.numel())
        bad = (values < 0) | (values >= limit_of_id)
        return bad if bool(bad.any()) else None

    def _describe(self, features: KeyedJaggedTensor, bad: torch.Tensor) -> str:
        first = int(bad.nonzero()[0])
        ends = torch.tensor(features.length_per_key()).cumsum(0)
        feature = features.keys()[int((ends > first).nonzero()[0])]
        table = self._table_of_feature[feature]
        has = "has rows" if table.mapping is None else "maps the ids"
        return (
            f"feature '{feature}' of table '{table.full_name}' has the id {int(features.values()[first])}, but the "
            f"table {has} 0 to {table.num_ids - 1} ({int(bad.sum())} such ids in this batch on rank "
            f"{self.ranks.rank}). Give the table more rows, map the ids into its range, or set check_ids='warn' or "
            "'ignore'."
        )
