"""What cannot be fully sharded, or not with the same numbers: refused by name before the first step."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.optim import LBFGS, Optimizer

from lightning_distrec.errors import ConfigError, UnsupportedError
from lightning_distrec.optimizers.sparse_weights import sparse_weights

INEXACT_OVER_SHARDS = ("Adafactor", "Muon", "Rprop")
"""Optimizers of torch that were tried over DTensors, and fail or have other numbers."""


def refuse_sharded(module: nn.Module, strategy: str) -> None:
    """Raise ConfigError: an earlier run has sharded the module's parameters."""
    found = next((name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)), None)
    if found is not None:
        raise ConfigError(
            f"{strategy}: '{found}' was sharded over the ranks by an earlier run under FSDP, and stays so. Build a new "
            "module, and load trainer.strategy.full_state_dict() of that run, or a checkpoint, into it."
        )


def refuse_module(module: nn.Module) -> None:
    """Raise ConfigError: a parameter has no shape yet. Raise UnsupportedError: gradients are sparse."""
    lazy = [name for name, parameter in module.named_parameters() if isinstance(parameter, UninitializedParameter)]
    if lazy:
        raise ConfigError(
            f"'{lazy[0]}' has no shape before the first forward (a lazy module). Run one batch through the module "
            "before fit, in configure_model for example, or give the layer its size."
        )
    sparse = list(sparse_weights(module).values())
    if sparse:
        raise UnsupportedError(
            f"'{sparse[0]}' has sparse gradients, which FSDP2 does not reduce. Use strategy='torchrec_sharded', which "
            "shards it and updates only the rows that were looked up, or sparse=False for it."
        )


def refuse_mixed_dtypes(module: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise UnsupportedError: parameters that are gathered as one have several types."""
    paths = {id(submodule): path for path, submodule in module.named_modules()}
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    outside = [(name, p) for name, p in module.named_parameters() if id(p) not in in_blocks]
    groups = [(paths[id(block)], list(block.named_parameters())) for block in blocks]
    for path, parameters in [*groups, ("parameters outside of blocks", outside)]:
        by_dtype = {parameter.dtype: name for name, parameter in parameters if parameter.is_floating_point()}
        if len(by_dtype) > 1:
            named = ", ".join(f"'{name}' ({str(dtype).removeprefix('torch.')})" for dtype, name in by_dtype.items())
            raise UnsupportedError(
                f"{path}: {named} are of several types, and FSDP2 gathers one type at a time. Name blocks with one "
                "type each, wrap=[...], or convert the parameters."
            )


def refuse_inexact_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Raise UnsupportedError: an optimizer has other numbers over shards than over full parameters."""
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS):
            raise UnsupportedError(
                "torch.optim.LBFGS flattens all parameters into one vector, which sharded ones do not have. Use "
                "another optimizer, or strategy='ddp_tuned'."
            )
        if type(optimizer).__name__ in INEXACT_OVER_SHARDS and type(optimizer).__module__.startswith("torch.optim"):
            raise UnsupportedError(
                f"torch.optim.{type(optimizer).__name__} fails, or has other numbers, over sharded parameters (tried "
                "with torch 2.13). Use another optimizer, or strategy='ddp_tuned'."
            )


def refuse_optimizers(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    """Raise where optimizers would not update the sharded parameters, or with other numbers.

    ConfigError: they hold parameters of before sharding. UnsupportedError: see refuse_inexact_optimizers.
    """
    refuse_inexact_optimizers(optimizers)
    current = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        for i, group in enumerate(optimizer.param_groups):
            if stale := [tuple(p.shape) for p in group["params"] if id(p) not in current]:
                raise ConfigError(
                    f"configure_optimizers gave {type(optimizer).__name__}, param group {i}, a parameter of shape "
                    f"{stale[0]} that is not in the module. Sharding replaces the module's parameters: take them from "
                    "self.parameters() in configure_optimizers, not from a list that was made before."
                )


@contextmanager
def explained_errors(module: nn.Module) -> Iterator[None]:
    """Around a step, its backward and its update: explain torch's errors about sharded parameters, and what to do."""
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" in str(error):
            raise UnsupportedError(_weights_of_uncalled_block(module)) from error
        if "requiring a storage size" in str(error):
            raise UnsupportedError(
                "backward needs weights of a block that have been freed: backward ran twice (gradients of gradients), "
                "or the block returns its tensors inside of an object that torch cannot look into. Name other blocks, "
                "wrap=[...]; wrap=[] gathers all for the whole step."
            ) from error
        if "Sharding propagation failed" in str(error) or "require placement changes" in str(error):
            raise UnsupportedError(
                "a step or an optimizer computes something over sharded parameters that torch's DTensor cannot. Use "
                "strategy='ddp_tuned', or another optimizer."
            ) from error
        raise


def _weights_of_uncalled_block(module: nn.Module) -> str:
    sharded = [name for name, parameter in module.named_parameters() if isinstance(parameter, DTensor)]
    return (
        "a step uses the weights of a block without calling it (block.layer(x), block.weight, a sum over "
        "self.parameters()), while they are sharded: a block's weights are gathered when the block itself is called. "
        "Name other blocks, wrap=[...], without this one; wrap=[] gathers all for the whole step. To clip by hand, use "
        f"self.clip_gradients. Sharded are: {', '.join(sharded[:5])}{' ...' if sharded[5:] else ''}."
    )
