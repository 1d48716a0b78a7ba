"""How many ids a rank's batch has of a table, how many of them are different, and whether to send each once."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_DISTINCT_SHARE = 0.75
"""Up to it steps of two gloo ranks on one machine took less time with each id sent once: `python -m
tests.benchmarks.distinct_ids`."""
MIN_IDS = 2048
"""From it on; finding the different ones of fewer ids took what the exchange spared."""


@dataclass(frozen=True)
class BatchIds:
    """The ids of one table in a rank's batch."""

    ids: float
    distinct_share: float
    """Different ids over ids, feature by feature."""

    @staticmethod
    def of(numbers: Sequence[float], num_rows: int, counted_share: float | None) -> "BatchIds":
        """Return what was counted, or what ids have that are spread evenly over the rows: others repeat more.

        numbers: ids of each feature.
        """
        if counted_share is not None:
            return BatchIds(sum(numbers), counted_share)
        return BatchIds(sum(numbers), sum(_looked_up(number, num_rows) for number in numbers) / sum(numbers))

    @property
    def repeat_enough(self) -> bool:
        """Whether sending each id once is worth the time of finding the different ones."""
        return self.ids >= MIN_IDS and self.distinct_share <= MAX_DISTINCT_SHARE


def _looked_up(number: float, rows: int) -> float:
    """Return how many of `rows` rows that many ids look up, if they are spread evenly."""
    return 1.0 if rows == 1 else -rows * math.expm1(number * math.log1p(-1 / rows))
