"""What may be said about planning: how tables find their ranks."""

from dataclasses import dataclass

from lightning_distrec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """How it is decided where tables go."""

    plan_file: str | None = None
    """Place tables as this file says, or the one in this checkpoint's folder; it must suit the model and the ranks."""

    save_plan: bool = True
    """Whether a fit saves its plan as plan.json: in the folder of its logs, and in each distributed checkpoint."""

    def __post_init__(self) -> None:
        if self.plan_file is not None and (not isinstance(self.plan_file, str) or not self.plan_file):
            raise ConfigError(
                f"plan_file={self.plan_file!r}: a path as a string is needed, or None to let tables be planned."
            )
