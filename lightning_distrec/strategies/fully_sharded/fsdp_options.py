"""Options of FSDP2, and what follows from them: the types in which it gathers and reduces, and the
mesh of ranks."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_distrec._compat.torch_distributed import split_ranks
from lightning_distrec.errors import ConfigError, UnsupportedError
from lightning_distrec.option_values import plain_fields
from lightning_distrec.strategies.data_parallel.activations import ActivationCheckpointing

Replicas = int | Literal["nodes"]
ReshardAfterForward = Literal["auto"] | bool
Dtype = Literal["fp32", "bf16", "fp16"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
COMPUTE_DTYPES: dict[str, torch.dtype | None] = {
    "32-true": None,
    "64-true": None,
    "bf16-true": None,
    "16-true": None,
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
}
"""Precision -> the type in which parameters are gathered; None: their own."""


@dataclass(frozen=True, kw_only=True)
class FSDPOptions:
    """How a module's parameters are sharded, gathered and freed."""

    wrap: Literal["auto"] | list[str] = "auto"
    """Blocks, each gathered and freed as one: "auto", or a list of class names, and of paths in the
    module."""
    min_num_parameters: int = 1_000_000
    """Minimum number of parameters of a block with wrap="auto"."""
    replicas: Replicas = 1
    """Number of copies of the parameters, each sharded over consecutive ranks (HSDP); "nodes": one
    on each node."""
    reshard_after_forward: ReshardAfterForward = "auto"
    """Whether to free a block's parameters after forward, and gather them again; "auto": for all
    but the last."""
    activation_checkpointing: ActivationCheckpointing = False
    """Layers that recompute their activations in backward: true (the blocks), or names and
    paths."""
    param_dtype: Dtype | None = None
    """Type in which parameters are gathered. None: the precision's. With "32-true", blocks compute
    in it."""
    reduce_dtype: Dtype | None = None
    """Type in which gradients are sent and summed. None: float32, or that of parameters with a true
    precision."""

    offload: bool = False
    """Keep parameters, gradients and optimizer state on the host, and update there. For GPUs:
    slower, less memory."""

    def __post_init__(self) -> None:
        plain_fields(self)
        if self.min_num_parameters < 1:
            raise ConfigError(f"min_num_parameters={self.min_num_parameters}: must be at least 1.")
        if self.replicas != "nodes" and self.replicas < 1:
            raise ConfigError(f"replicas={self.replicas!r}: must be 'nodes', or at least 1.")


@dataclass(frozen=True)
class Dtypes:
    """The types of one run."""

    param: torch.dtype | None
    """Type in which parameters are gathered; None: their own."""
    reduce: torch.dtype | None
    """Type in which gradients are reduced; None: that of the gathered parameters."""
    casts: bool
    """Whether blocks cast their inputs to `param` and their outputs back. Without autocast nobody
    else does, so what is in no block computes in its own type."""

    def root_policy(self) -> MixedPrecisionPolicy:
        """Return the policy of what is in no block."""
        return MixedPrecisionPolicy(
            None if self.casts else self.param, self.reduce, cast_forward_inputs=False
        )

    def block_policy(self, is_nested: bool) -> MixedPrecisionPolicy:
        """Return the policy of a block. is_nested: whether another block contains it, and takes its
        outputs."""
        output_dtype = torch.float32 if self.casts and not is_nested else None
        return MixedPrecisionPolicy(
            self.param, self.reduce, output_dtype=output_dtype, cast_forward_inputs=self.casts
        )


def choose_dtypes(options: FSDPOptions, precision: str) -> Dtypes:
    """Return the types for a precision of the Trainer.

    Raises UnsupportedError: the precision is not supported; ConfigError: an option contradicts it.
    """
    if precision not in COMPUTE_DTYPES:
        raise UnsupportedError(
            f"Trainer(precision={precision!r}): fsdp_tuned supports "
            f"{', '.join(map(repr, COMPUTE_DTYPES))}."
        )
    if options.offload and precision == "16-mixed":
        # It copies the scale and its findings to the host, and reads them there before they have
        # arrived.
        raise UnsupportedError(
            "offload with Trainer(precision='16-mixed'): torch's GradScaler reads the scale of "
            "gradients on the host before it is there. Use 'bf16-mixed' or '32-true'."
        )
    precision_dtype = COMPUTE_DTYPES[precision]
    is_mixed = precision.endswith("-mixed")
    param = precision_dtype
    if options.param_dtype is not None:
        param = DTYPES[options.param_dtype]
        _refuse_param_dtype(options.param_dtype, param, precision_dtype, precision)
        param = None if param == torch.float32 else param
    reduce = torch.float32 if param is not None else None
    return Dtypes(
        param=param,
        reduce=DTYPES[options.reduce_dtype] if options.reduce_dtype is not None else reduce,
        casts=param is not None and not is_mixed,
    )


def _refuse_param_dtype(
    name: str, param: torch.dtype, precision_dtype: torch.dtype | None, precision: str
) -> None:
    setting = f"param_dtype={name!r} with Trainer(precision={precision!r})"
    if precision.endswith("-true") and precision != "32-true":
        raise ConfigError(
            f"{setting}: all parameters are of that precision. Remove param_dtype, or use "
            "'32-true'."
        )
    if precision == "32-true" and param == torch.float16:
        raise ConfigError(
            f"{setting}: gradients of 16 bits need loss scaling. Use 'bf16', or "
            "precision='16-mixed'."
        )
    if precision_dtype is not None and param not in (precision_dtype, torch.float32):
        autocast = str(precision_dtype).removeprefix("torch.")
        raise ConfigError(
            f"{setting}: autocast computes in {autocast}. Use 'fp32', or another precision."
        )


def make_mesh(
    options: FSDPOptions, device: torch.device, ranks_on_node: Sequence[int], timeout: timedelta
) -> DeviceMesh:
    """Collective. Return a mesh of all ranks: (data_parallel,), or (replicate, shard) with more
    than one replica.

    Consecutive ranks share one replica of the parameters.
    ranks_on_node: for each rank, the number of ranks on its node.
    Raises ConfigError: the ranks cannot be divided evenly among replicas.
    """
    num_ranks = len(ranks_on_node)
    replicas = num_replicas(options.replicas, ranks_on_node)
    if replicas == 1:
        return init_device_mesh(device.type, (num_ranks,), mesh_dim_names=("data_parallel",))
    # By hand, because groups that init_device_mesh makes have torch's default timeout.
    ranks = torch.arange(num_ranks).view(replicas, -1)
    groups = [split_ranks(members.tolist(), timeout) for members in (ranks.T, ranks)]
    return DeviceMesh.from_group(
        groups, device.type, ranks.tolist(), mesh_dim_names=("replicate", "shard")
    )


def num_replicas(replicas: Replicas, ranks_on_node: Sequence[int]) -> int:
    """Return the number of replicas. Raises ConfigError: the ranks cannot be divided evenly among
    them.

    ranks_on_node: for each rank, the number of ranks on its node.
    """
    num_ranks = len(ranks_on_node)
    if replicas == "nodes":
        if len(set(ranks_on_node)) > 1:
            counts = ", ".join(map(str, sorted(set(ranks_on_node))))
            raise ConfigError(
                f"replicas='nodes': nodes have unequal numbers of ranks ({counts}). Set a number."
            )
        return num_ranks // ranks_on_node[0]
    if num_ranks % replicas:
        raise ConfigError(
            f"replicas={replicas}: {num_ranks} ranks cannot be divided evenly among them. Use a "
            f"divisor of {num_ranks}."
        )
    return replicas
