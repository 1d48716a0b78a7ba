"""What may be said about checkpoints."""

from dataclasses import dataclass, field

from lightning_distrec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """How checkpoints are written, and how they are read where the module has changed since."""

    distributed: bool = True
    """Whether each rank writes its own part, into a folder. False: rank 0 gathers whole tables and writes one file,
    as Lightning does."""

    async_save: bool = False
    """Whether training goes on while a copy of the tables on the host is written; at most one at a time."""

    start_from: str | None = None
    """Path of weights that a new run starts from: a checkpoint's folder, a Lightning checkpoint, a state_dict of
    torch.save, or a safetensors file."""

    rename: dict[str, str] = field(default_factory=dict)
    """Names in the checkpoint -> names in the module: of a parameter, or of a submodule and so of all below it."""

    grow_tables: bool = False
    """Whether a table may have more rows than in the checkpoint: the old rows are kept, the others are new."""

    def __post_init__(self) -> None:
        if self.async_save and not self.distributed:
            raise ConfigError(
                "checkpoint: async_save=True writes each rank's part; distributed=False gathers whole tables first. "
                "Set one of them."
            )
        if not isinstance(self.rename, dict):
            raise ConfigError(f"checkpoint: rename={self.rename!r} must be names in the checkpoint -> in the module.")

    def renamed(self, name: str) -> str:
        """Return the name in the module of what has `name` in the checkpoint."""
        for old, new in self.rename.items():
            if name == old or name.startswith(f"{old}."):
                return new + name[len(old) :]
        return name
