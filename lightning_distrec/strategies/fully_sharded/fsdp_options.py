"""What may be said about parameters that are cut over the ranks."""

from dataclasses import dataclass
from typing import Literal

from lightning_distrec.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class FSDPOptions:
    """How a module's parameters are cut, gathered and freed."""

    wrap: Literal["auto"] | list[str] = "auto"
    """The blocks, each gathered and freed as one. "auto": of at least min_num_parameters, the parts that stand beside
    others of their kind and shapes, and single layers; or a list of classes' names, and of paths in the module."""

    min_num_parameters: int = 1_000_000
    """See wrap."""

    replicas: int | Literal["nodes"] = 1
    """So many copies of the parameters, each cut over the ranks that follow each other; "nodes": one on each node."""

    reshard_after_forward: Literal["auto"] | bool = "auto"
    """Whether a block's parameters are freed after forward, and gathered again; "auto": of all blocks but the last."""

    activation_checkpointing: bool = False
    """Whether blocks keep no activations for backward, but run their forward once more."""

    cpu_offload: bool = False
    """Whether parameters, gradients and optimizer state stay on the host (CUDA)."""

    def __post_init__(self) -> None:
        if isinstance(self.wrap, str) and self.wrap != "auto":
            raise ConfigError(
                f"wrap={self.wrap!r}: must be 'auto', or a list of classes' names and of paths: [{self.wrap!r}]."
            )
        if self.min_num_parameters < 1:
            raise ConfigError(f"min_num_parameters={self.min_num_parameters}: must be at least 1.")
        if self.reshard_after_forward not in ("auto", True, False):
            raise ConfigError(f"reshard_after_forward={self.reshard_after_forward!r}: must be 'auto', true or false.")
        if self.replicas != "nodes" and (isinstance(self.replicas, str) or self.replicas < 1):
            raise ConfigError(f"replicas={self.replicas!r}: must be 'nodes', or at least 1.")
