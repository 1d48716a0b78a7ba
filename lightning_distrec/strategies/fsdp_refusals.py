"""What cannot be fully sharded, or not with the same numbers, refused by name before the first step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from lightning_distrec.errors import ConfigError, UnsupportedError

COMPUTE_DTYPES: dict[str, torch.dtype | None] = {
    "32-true": None,
    "64-true": None,
    "bf16-true": None,
    "16-true": None,
    "bf16-mixed": torch.bfloat16,
}
"""Precision -> the type in which parameters are gathered; None: their own."""


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


def refuse_module(module: nn.Module) -> None:
    """Raise UnsupportedError: gradients of it are sparse."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    sparse = [path for path, part in module.named_modules() if isinstance(part, kinds) and part.sparse]
    if sparse:
        raise UnsupportedError(
            f"'{sparse[0]}' has sparse gradients, which FSDP2 does not add up. Use strategy='torchrec_sharded', which "
            "shards it and updates only the rows that were looked up, or sparse=False for it."
        )


def refuse_optimizers(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    """Raise where optimizers would not update the sharded parameters, or not as they would whole ones.

    ConfigError: some are of before the module was sharded. UnsupportedError: LBFGS, over one flat vector of all.
    """
    known = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise UnsupportedError(
                "torch.optim.LBFGS lays all parameters out in one vector, which sharded ones have not. Use another "
                "optimizer, or strategy='ddp_tuned'."
            )
        for i, group in enumerate(optimizer.param_groups):
            if stale := [tuple(p.shape) for p in group["params"] if id(p) not in known]:
                raise ConfigError(
                    f"configure_optimizers gave {type(optimizer).__name__}, param group {i}, a parameter of shape "
                    f"{stale[0]} that is not in the module. Sharding replaces the module's parameters: take them from "
                    "self.parameters() in configure_optimizers, not from a list that was made before."
                )


@contextmanager
def explained(module: nn.Module) -> Iterator[None]:
    """Around a step: say what torch's error about a sharded parameter among plain tensors means here."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        sharded = [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
        raise UnsupportedError(
            "a step uses the weights of a block without calling it (block.layer(x), or block.weight), while they are "
            "sharded: a block's weights are gathered when the block itself is called. Name other blocks, wrap=[...], "
            f"such that this one is none; wrap=[] gathers all for the whole step. Sharded are: {', '.join(sharded[:5])}"
            f"{' ...' if sharded[5:] else ''}."
        ) from error
