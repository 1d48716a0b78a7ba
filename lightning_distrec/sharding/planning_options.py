"""What may be said about planning: how tables find their ranks."""

from dataclasses import dataclass

from lightning_distrec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """How it is decided where tables go."""

    estimate_pooling: int = 0
    """Batches of each rank's training dataloader in which the ids per example of every feature are counted before
    tables are planned, where no pooling_factor is given; 0: none."""

    def __post_init__(self) -> None:
        if self.estimate_pooling < 0:
            raise ConfigError(
                f"planning.estimate_pooling={self.estimate_pooling}: a number of batches is needed, 0 for none."
            )
