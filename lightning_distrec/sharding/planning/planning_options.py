"""Options for planning: how tables are assigned to ranks."""

from dataclasses import dataclass
from typing import Any, Literal

from lightning_distrec.errors import ConfigError
from lightning_distrec.sharding.planning.bandwidths import Bandwidths, check_bandwidths
from lightning_distrec.sharding.planning.reservation import check_reserve


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """How it is decided where tables go."""

    bandwidths: Bandwidths | dict[str, Any] | Literal["measure", "remeasure"] | None = None
    """How fast bytes move: intra_node, cross_node, device_memory, host_memory, host_to_device, each such as "25GB/s" or
    "measure". "measure" measures what neither this nor INTRA_NODE_BANDWIDTH and CROSS_NODE_BANDWIDTH say, or takes what
    was measured here within 30 days; "remeasure" does not. None: those variables, or else torchrec's defaults."""

    reserve: str | None = None
    """Memory of each rank that is not for tables: a percentage such as "15%", a size such as "4GB", or "measure", which
    weighs the layers without tables. None: STORAGE_RESERVE_PERCENT, or else 15%."""

    estimate_pooling: int = 0
    """Batches of each rank's training dataloader in which the ids per example of every feature are counted before
    tables are planned, where no pooling_factor is given; 0: none."""

    plan_file: str | None = None
    """Place tables as this file says, or the one in this checkpoint's folder; it must suit the model and the ranks."""

    save_plan: bool = True
    """Whether a fit saves its plan as plan.json: in the folder of its logs, and in each distributed checkpoint."""

    def __post_init__(self) -> None:
        check_bandwidths(self.bandwidths)
        check_reserve(self.reserve)
        if self.estimate_pooling < 0:
            raise ConfigError(
                f"planning.estimate_pooling={self.estimate_pooling}: a number of batches is needed, 0 for none."
            )
        if self.plan_file is not None and (not isinstance(self.plan_file, str) or not self.plan_file):
            raise ConfigError(
                f"plan_file={self.plan_file!r}: a path as a string is needed, or None to let tables be planned."
            )
