"""What a plan costs, rank by rank, as torchrec's estimators reckon it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TIME_PARTS = (
    "forward compute",
    "forward exchange",
    "backward compute",
    "backward exchange",
    "prefetch",
    "exchange of ids",
)
"""The parts of a step's time that torchrec's estimators know; together they are the time that counts.

torchrec's own total leaves the ids out, and so do its planner's plans: over a slow link they may be half of the bytes.
"""


@dataclass(frozen=True)
class PlanCost:
    """The estimates of one plan. Shapes: R is the number of ranks."""

    milliseconds: NDArray[np.float64]
    """(R, 6): time of a step that a rank spends on tables, by `TIME_PARTS`."""
    device_bytes: NDArray[np.int64]
    """(R,): memory of the rank's GPU that tables and their exchange take; on CPU, of its host."""
    host_bytes: NDArray[np.int64]
    """(R,): memory of the host that tables take which a GPU reads from there (fused_uvm kernels); 0 on CPU."""
    device_bytes_usable: NDArray[np.int64]
    """(R,): what there is for that, after what is reserved for all else."""
    host_bytes_usable: NDArray[np.int64]
    """(R,): the same of the host's, for a GPU's rank; 0 on CPU."""

    @property
    def milliseconds_by_rank(self) -> NDArray[np.float64]:
        """(R,): all parts together."""
        total: NDArray[np.float64] = self.milliseconds.sum(axis=1)
        return total

    @property
    def critical_path(self) -> float:
        """Milliseconds that the slowest rank spends on tables in a step: what planning makes small."""
        return float(self.milliseconds_by_rank.max(initial=0.0))
