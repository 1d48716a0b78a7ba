"""What batches look up in a table: how many ids, how many different ones, and how few rows take most of them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TableData:
    """Counted in some batches of one rank."""

    num_batches: int
    ids_per_example: tuple[float, ...]
    """Of each feature."""
    ids_per_batch: float
    distinct_per_batch: float
    """Different rows that a batch looks up, in the mean."""
    distinct: int
    """Different rows in all of the batches together."""
    rows_for_half: int
    """Fewest rows that take half of all ids."""
    hottest_share: float
    """Share of all ids that are of the row looked up most often."""

    @property
    def repeats(self) -> float:
        """How often a batch looks up each of its rows: what fetching each row once would spare."""
        return self.ids_per_batch / max(1.0, self.distinct_per_batch)

    @property
    def distinct_share(self) -> float:
        """Different rows over ids, of all batches together."""
        return self.distinct / max(1.0, self.ids_per_batch * self.num_batches)
