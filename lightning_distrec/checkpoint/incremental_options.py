"""Options of checkpoints by difference."""

from dataclasses import dataclass

from lightning_distrec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class IncrementalOptions:
    """When to save the rows that have changed, and when everything. Every saving is a folder of its own."""

    every: int
    """Steps between two checkpoints, of the rows that were looked up since the last full one of these."""

    full_every: int
    """Steps between two full ones, a multiple of `every`; the first one of each fit is full too."""

    keep: int = 2
    """Newest checkpoints to keep, with the full ones that they need."""

    dirpath: str | None = None
    """Folder for them, on a file system that all ranks share; None: one for each job, in default_root_dir."""

    def __post_init__(self) -> None:
        for name in ("every", "full_every", "keep"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"checkpoint: incremental: {name}={value!r} must be a whole number of at least 1.")
        if self.full_every % self.every:
            raise ConfigError(
                f"checkpoint: incremental: full_every={self.full_every} is no multiple of every={self.every}. Both are "
                f"numbers of steps: set full_every={10 * self.every}, for one."
            )


def as_incremental(options: object) -> IncrementalOptions | None:
    """Return the options, from a dict of them too. Raises ConfigError: they are something else."""
    if options is None or isinstance(options, IncrementalOptions):
        return options
    try:
        return IncrementalOptions(**options)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(
            f"checkpoint: incremental={options!r}: {error}. Give it every and full_every, both in steps: "
            "{'every': 200, 'full_every': 2000}."
        ) from None
