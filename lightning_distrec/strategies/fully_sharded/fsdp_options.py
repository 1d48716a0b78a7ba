"""Options for parameters that are sharded over the ranks by FSDP2."""

from dataclasses import dataclass
from typing import Literal

import torch

from lightning_distrec.errors import ConfigError
from lightning_distrec.strategies.activations.layers import ActivationCheckpointing, check_option

Replicas = int | Literal["nodes"]
ReshardAfterForward = Literal["auto"] | bool
Dtype = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class FSDPOptions:
    """How a module's parameters are sharded, gathered and freed."""

    wrap: Literal["auto"] | list[str] = "auto"
    """Blocks, each gathered and freed as one. "auto": submodules of at least min_num_parameters that repeat (siblings
    of one class and shapes) or are single layers; or a list of class names, and of paths in the module."""

    min_num_parameters: int = 1_000_000
    """Minimum number of parameters of a block with wrap="auto"."""

    replicas: Replicas = 1
    """Number of copies of the parameters, each sharded over consecutive ranks (HSDP); "nodes": one on each node."""

    reshard_after_forward: ReshardAfterForward = "auto"
    """Whether to free a block's parameters after forward, and gather them again for backward; "auto": for all blocks
    but the last."""

    activation_checkpointing: ActivationCheckpointing = False
    """Layers that recompute their activations in backward instead of keeping them: true for the blocks, or class names
    and paths; "auto", or a size like "4GiB": as few of those that repeat as it takes to fit into memory, or it."""

    cpu_offload: bool = False
    """Whether to keep parameters, gradients and optimizer state on the host (CUDA)."""

    param_dtype: Dtype | None = None
    """Type in which parameters are gathered. None: the precision's. With precision="32-true", blocks compute in it:
    they cast their inputs to it, and their outputs back."""

    reduce_dtype: Dtype | None = None
    """Type in which gradients are sent and summed. None: float32, or that of parameters with a true precision."""

    buffer_dtype: Dtype | None = None
    """Type into which floating-point buffers of blocks are converted. None: leave them as they are."""

    forward_prefetch: int = 0
    """Blocks that are gathered ahead in forward, in the order in which the module has them. 0: torch's own way."""

    backward_prefetch: int = 0
    """Blocks that are gathered ahead in backward, in reverse order. 0: torch's own way, one."""

    def __post_init__(self) -> None:
        if isinstance(self.wrap, str) and self.wrap != "auto":
            raise ConfigError(
                f"wrap={self.wrap!r}: must be 'auto', or a list of class names and of paths: [{self.wrap!r}]."
            )
        if self.min_num_parameters < 1:
            raise ConfigError(f"min_num_parameters={self.min_num_parameters}: must be at least 1.")
        if self.reshard_after_forward not in ("auto", True, False):
            raise ConfigError(f"reshard_after_forward={self.reshard_after_forward!r}: must be 'auto', true or false.")
        if self.replicas != "nodes" and (isinstance(self.replicas, str) or self.replicas < 1):
            raise ConfigError(f"replicas={self.replicas!r}: must be 'nodes', or at least 1.")
        check_option(self.activation_checkpointing)
        for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            if (dtype := getattr(self, name)) is not None and dtype not in DTYPES:
                raise ConfigError(f"{name}={dtype!r} is not known. Use one of {', '.join(map(repr, DTYPES))}.")
        for name in ("forward_prefetch", "backward_prefetch"):
            if (number := getattr(self, name)) < 0:
                raise ConfigError(f"{name}={number}: must be a number of blocks, or 0.")
