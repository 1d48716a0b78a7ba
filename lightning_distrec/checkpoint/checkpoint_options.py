"""Options of checkpoints, those by difference included."""

import math
from dataclasses import dataclass, field

from lightning_distrec.errors import ConfigError
from lightning_distrec.option_values import plain_fields
from lightning_distrec.units import parse_bandwidth


@dataclass(frozen=True, kw_only=True)
class IncrementalOptions:
    """When to save the rows that have changed, and when everything. Every saving is a folder of its
    own."""

    every: int
    """Steps between two checkpoints, of the rows that were looked up since the last full one of
    these."""

    full_every: int
    """Steps between two full ones, a multiple of `every`; the first one of each fit is full too."""

    keep: int = 2
    """Newest checkpoints to keep, with the full ones that they need."""

    dirpath: str | None = None
    """Folder for them, on a file system that all ranks share; None: one for each job, in
    default_root_dir."""

    def __post_init__(self) -> None:
        plain_fields(self)
        for name in ("every", "full_every", "keep"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(
                    f"checkpoint: incremental: {name}={value!r} must be a whole number of at least "
                    "1."
                )
        if self.full_every % self.every:
            problem = f"full_every={self.full_every} is no multiple of every={self.every}"
            raise ConfigError(
                f"checkpoint: incremental: {problem}. Set full_every={10 * self.every}, for one."
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """How to write checkpoints, and how to load those of a module that has changed since."""

    distributed: bool | None = None
    """True: write a folder, to which each rank writes its own shards. False: let rank 0 gather and
    write one file, as Lightning does. None: a folder where tensors are sharded and take 2 GiB or
    more; otherwise one file."""

    async_save: bool = False
    """Train on while a copy of the tables on the host is written; at most one checkpoint at a
    time."""

    async_bytes_per_second: str | float | None = None
    """Limit what each rank writes while training goes on, e.g. "200MB/s", for disks that others
    share. Nothing limits it where the run waits for the checkpoint. None: no limit."""

    pickles: bool = False
    """Save hyperparameters and what hooks put into checkpoints as they are, as Lightning does,
    though loading then runs the code of their types, and load such checkpoints. Only for
    checkpoints that you trust."""

    start_from: str | None = None
    """Path of weights to start a new run from: a checkpoint's folder, a Lightning checkpoint, a
    state_dict of torch.save, or a safetensors file."""

    rename: dict[str, str] = field(default_factory=dict)
    """Map names in the checkpoint to names in the module, of parameters or of submodules with all
    below them."""

    grow_tables: bool = False
    """Accept tables with more rows than in the checkpoint: load the old rows, and initialize the
    others."""

    incremental: IncrementalOptions | None = None
    """Save the rows that have changed every few steps, besides what ModelCheckpoint saves; None: do
    not."""

    def __post_init__(self) -> None:
        plain_fields(self)
        if self.incremental is not None and not isinstance(self.incremental, IncrementalOptions):
            try:
                object.__setattr__(self, "incremental", IncrementalOptions(**self.incremental))
            except TypeError as error:
                problem = f"checkpoint: incremental={self.incremental!r}: {error}"
                raise ConfigError(
                    f"{problem}. Set every and full_every, in steps: {{'every': 200, 'full_every': "
                    "2000}."
                ) from None
        if self.incremental is not None and self.distributed is False:
            raise ConfigError(
                "checkpoint: incremental writes folders. Leave distributed=False out."
            )
        limit = self.async_bytes_per_second
        if limit is not None:
            setting = f"checkpoint: async_bytes_per_second={limit!r}"
            parse_bandwidth(limit, setting)
            if not self.async_save:
                raise ConfigError(
                    f"{setting} limits what is written while training goes on. Set async_save=True "
                    "too."
                )

    @property
    def writing_limit(self) -> float:
        """What each rank writes while training goes on, in bytes per second; infinity: all it
        can."""
        limit = self.async_bytes_per_second
        return math.inf if limit is None else parse_bandwidth(limit, "async_bytes_per_second")

    def renamed(self, name: str) -> str:
        """Return the name in the module of what is called `name` in the checkpoint."""
        for old, new in self.rename.items():
            if name == old or name.startswith(f"{old}."):
                return new + name[len(old) :]
        return name
