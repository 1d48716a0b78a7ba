"""Options of checkpoints."""

from dataclasses import dataclass, field

from lightning_distrec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """How to write checkpoints, and how to load those of a module that has changed since."""

    distributed: bool = True
    """Let each rank write its own shards, into a folder. False: gather full tables on rank 0, and write one file as
    Lightning does."""

    async_save: bool = False
    """Train on while a copy of the tables on the host is written; at most one checkpoint at a time."""

    start_from: str | None = None
    """Path of weights to start a new run from: a checkpoint's folder, a Lightning checkpoint, a state_dict of
    torch.save, or a safetensors file."""

    rename: dict[str, str] = field(default_factory=dict)
    """Map names in the checkpoint to names in the module, of parameters or of submodules with all below them."""

    grow_tables: bool = False
    """Accept tables with more rows than in the checkpoint: load the old rows, and initialize the others."""

    def __post_init__(self) -> None:
        if self.async_save and not self.distributed:
            raise ConfigError(
                "checkpoint: async_save=True needs distributed=True, where each rank writes its own shards. Set one of "
                "them only: async_save=True or distributed=False."
            )
        if not isinstance(self.rename, dict):
            raise ConfigError(
                f"checkpoint: rename={self.rename!r} must map names in the checkpoint to names in the module."
            )

    def renamed(self, name: str) -> str:
        """Return the name in the module of what is called `name` in the checkpoint."""
        for old, new in self.rename.items():
            if name == old or name.startswith(f"{old}."):
                return new + name[len(old) :]
        return name
