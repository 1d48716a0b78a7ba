"""What cannot be fully sharded, or not with the same numbers, refused by name before the first step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.optim import LBFGS, Optimizer

from lightning_distrec.errors import ConfigError, UnsupportedError
from lightning_distrec.strategies.data_parallel.sparse_gradients import sparse_weights

COMPUTE_DTYPES: dict[str, torch.dtype | None] = {
    "32-true": None,
    "64-true": None,
    "bf16-true": None,
    "16-true": None,
    "bf16-mixed": torch.bfloat16,
}
"""Precision -> the type in which parameters are gathered; None: their own."""


NOT_OF_PARTS = ("Adafactor", "Muon", "Rprop")
"""Optimizers of torch that were tried and are not exact, or fail, over DTensors."""


def compute_dtype(precision: str) -> torch.dtype | None:
    """Return the type in which parameters are gathered. Raises UnsupportedError: it was not tried with this one."""
    if precision not in COMPUTE_DTYPES:
        raise UnsupportedError(
            f"Trainer(precision={precision!r}): fsdp_tuned has one of {', '.join(map(repr, COMPUTE_DTYPES))}. The loss "
            "scaling of '16-mixed' was not tried over sharded gradients: use 'bf16-mixed'."
        )
    return COMPUTE_DTYPES[precision]


def num_replicas(replicas: int | Literal["nodes"], on_node: Sequence[int]) -> int:
    """Return the number of replicas. on_node: for each rank, how many are on its node.

    Raises ConfigError: the ranks cannot be shared out evenly among the replicas.
    """
    num_ranks = len(on_node)
    if replicas == "nodes":
        if len(set(on_node)) > 1:
            raise ConfigError(
                f"replicas='nodes': nodes have unequal numbers of ranks ({', '.join(map(str, sorted(set(on_node))))}), "
                "so that their copies of the parameters cannot be cut alike. Set a number of replicas."
            )
        return num_ranks // on_node[0]
    if num_ranks % replicas:
        raise ConfigError(
            f"replicas={replicas}: {num_ranks} ranks cannot be shared out evenly among them. Use a divisor of "
            f"{num_ranks}."
        )
    return replicas


def refuse_offload(offload: bool, device: torch.device) -> None:
    """Raise ConfigError: there is no device but the host."""
    if offload and device.type != "cuda":
        raise ConfigError(f"cpu_offload=true: all is on the host already, for the ranks compute on {device.type}.")


def refuse_sharded(module: nn.Module, strategy: str) -> None:
    """Raise ConfigError: an earlier run has cut the module's parameters."""
    found = next((name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)), None)
    if found is not None:
        raise ConfigError(
            f"{strategy}: '{found}' was cut over the ranks by an earlier run under FSDP, and stays so. Build a new "
            "module, and load trainer.strategy.whole_state_dict() of that run, or a checkpoint, into it."
        )


def refuse_types(parts: Sequence[tuple[str, Sequence[tuple[str, nn.Parameter]]]]) -> None:
    """Raise UnsupportedError where what is gathered as one has several types. parts: name, named parameters."""
    for path, parameters in parts:
        by_type = {parameter.dtype: name for name, parameter in parameters if parameter.is_floating_point()}
        if len(by_type) > 1:
            said = ", ".join(f"'{name}' ({str(dtype).removeprefix('torch.')})" for dtype, name in by_type.items())
            raise UnsupportedError(
                f"{path or 'what is in no block'}: {said} are of several types, and FSDP2 gathers one type at a time. "
                "Name blocks with one type each, wrap=[...], or convert the parameters."
            )


def refuse_module(module: nn.Module) -> None:
    """Raise ConfigError: parts have no shape yet. UnsupportedError: gradients of it are sparse."""
    lazy = [name for name, parameter in module.named_parameters() if isinstance(parameter, UninitializedParameter)]
    if lazy:
        raise ConfigError(
            f"'{lazy[0]}' has no shape before the first forward (a lazy module). Run one batch through the module "
            "before fit, in configure_model say, or give the layer its size."
        )
    sparse = list(sparse_weights(module).values())
    if sparse:
        raise UnsupportedError(
            f"'{sparse[0]}' has sparse gradients, which FSDP2 does not add up. Use strategy='torchrec_sharded', which "
            "shards it and updates only the rows that were looked up, or sparse=False for it."
        )


def refuse_inexact_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Raise UnsupportedError: optimizers that look at whole weights."""
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise UnsupportedError(
                "torch.optim.LBFGS lays all parameters out in one vector, which sharded ones have not. Use another "
                "optimizer, or strategy='ddp_tuned'."
            )
        if type(optimizer).__name__ in NOT_OF_PARTS and type(optimizer).__module__.startswith("torch.optim"):
            raise UnsupportedError(
                f"torch.optim.{type(optimizer).__name__} fails, or has other numbers, over parameters of which a rank "
                "has a part (tried with torch 2.13). Use another optimizer, or strategy='ddp_tuned'."
            )


def refuse_optimizers(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    """Raise where optimizers would not update the sharded parameters, or not as they would whole ones.

    ConfigError: some are of before the module was sharded. UnsupportedError: see refuse_to_cut.
    """
    refuse_inexact_optimizers(optimizers)
    known = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        for i, group in enumerate(optimizer.param_groups):
            if stale := [tuple(p.shape) for p in group["params"] if id(p) not in known]:
                raise ConfigError(
                    f"configure_optimizers gave {type(optimizer).__name__}, param group {i}, a parameter of shape "
                    f"{stale[0]} that is not in the module. Sharding replaces the module's parameters: take them from "
                    "self.parameters() in configure_optimizers, not from a list that was made before."
                )


@contextmanager
def explained(module: nn.Module) -> Iterator[None]:
    """Around a step, its backward and its update: say what torch's errors about sharded parameters mean here."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" in str(error):
            raise UnsupportedError(_mixed(module)) from error
        if "requiring a storage size" in str(error):
            raise UnsupportedError(
                "backward needs weights of a block that are not gathered any more: it was run through twice (gradients "
                "of gradients), or the block returns its tensors inside of an object that torch cannot take apart. "
                "Name other blocks, wrap=[...]; wrap=[] gathers all for the whole step."
            ) from error
        if "Sharding propagation failed" in str(error) or "require placement changes" in str(error):
            raise UnsupportedError(
                "a step computes something over sharded parameters that torch's DTensor cannot, or an optimizer does. "
                "Use strategy='ddp_tuned', or another optimizer."
            ) from error
        raise


def _mixed(module: nn.Module) -> str:
    sharded = [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
    return (
        "a step uses the weights of a block without calling it (block.layer(x), block.weight, a sum over "
        "self.parameters()), while they are sharded: a block's weights are gathered when the block itself is called. "
        "Name other blocks, wrap=[...], such that this one is none; wrap=[] gathers all for the whole step. To clip "
        f"by hand, use self.clip_gradients. Sharded are: {', '.join(sharded[:5])}{' ...' if sharded[5:] else ''}."
    )
