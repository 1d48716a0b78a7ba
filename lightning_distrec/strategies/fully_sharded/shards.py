"""The shards of a module's parameters after fully_shard: freed, drawn into, and updated by optimizers."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_distrec._compat.tensors import local_offsets
from lightning_distrec._compat.torch_distributed import (
    drop_unreduced_gradient,
    reset_after_failure,
    sharded_and_unsharded_parameters,
)
from lightning_distrec.checkpoint.lazy_tensors import materialized_as
from lightning_distrec.errors import ConfigError
from lightning_distrec.optimizers.gradient_hooks import note_replaced
from lightning_distrec.optimizers.step_hooks import refuse_inexact_optimizers


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """Return the module and submodules that fully_shard was called with."""
    return [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]


def reshard(module: nn.Module) -> None:
    """Free what a forward without a backward has left gathered, so that the module's parameters are the shards."""
    for fsdp_module in fsdp_modules(module):
        fsdp_module.reshard()


def drop_unfinished_step(module: nn.Module) -> None:
    """Reset a fully sharded module that a failed run may have left with gathered parameters and unreduced gradients."""
    if isinstance(module, FSDPModule):
        reset_after_failure(module)
    reshard(module)
    for fsdp_module in fsdp_modules(module):
        for _, unsharded in sharded_and_unsharded_parameters(fsdp_module):
            drop_unreduced_gradient(unsharded)


def refuse_sharded(module: nn.Module, strategy: str) -> None:
    """Raise ConfigError: an earlier run has sharded the module's parameters."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            raise ConfigError(
                f"{strategy}: '{name}' was sharded over the ranks by an earlier run under FSDP, and stays so. Call "
                "trainer.strategy.unshard() of that run first, or build a new module."
            )


def refuse_optimizers(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    """Raise where optimizers would not update the sharded parameters, or with other numbers.

    ConfigError: they hold parameters of before sharding. UnsupportedError: see refuse_inexact_optimizers.
    """
    refuse_inexact_optimizers(optimizers)
    refuse_stale(optimizers, module, ConfigError)


def refuse_stale(optimizers: Sequence[Optimizer], module: nn.Module, error: type[Exception]) -> None:
    """Raise `error`: an optimizer holds parameters that set-up has replaced, and would update no module."""
    current = {id(parameter) for parameter in module.parameters()}
    for optimizer in optimizers:
        for i, group in enumerate(optimizer.param_groups):
            if stale := [tuple(p.shape) for p in group["params"] if id(p) not in current]:
                raise error(
                    f"configure_optimizers gave {type(optimizer).__name__}, param group {i}, a parameter of shape "
                    f"{stale[0]} that is not in the module, whose parameters are replaced in set-up. Take them from "
                    "self.parameters() in configure_optimizers, not from a list that was made before."
                )


def swap_parameters(module: nn.Module, make: Callable[[str, nn.Parameter], nn.Parameter | None]) -> None:
    """Put what `make` returns for a name and its parameter in its place; None: leave it. Shared ones stay shared."""
    # With the earlier parameters, so that none is freed: a new one could have its id.
    swapped: dict[int, tuple[nn.Parameter, nn.Parameter | None]] = {}
    for path, submodule in module.named_modules():
        for name, parameter in list(submodule.named_parameters(path, recurse=False, remove_duplicate=False)):
            if id(parameter) not in swapped:
                swapped[id(parameter)] = parameter, make(name, parameter)
            if (new := swapped[id(parameter)][1]) is not None:
                setattr(submodule, name.rpartition(".")[2], new)
                note_replaced(parameter, new)


def full_or_meta(full: Mapping[str, Tensor], name: str, parameter: nn.Parameter) -> nn.Parameter:
    """Return a plain parameter with the value of this name, or without values on the meta device."""
    value = full.get(name)
    if value is None:
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(value, parameter.requires_grad)


def replace_parameters(
    optimizers: Sequence[Optimizer], full: Mapping[str, nn.Parameter], sharded: Mapping[str, nn.Parameter]
) -> None:
    """Let optimizers update a module's parameters after sharding in place of those before.

    State that exists already, of a loaded checkpoint for example, is sharded as its parameter is.
    full, sharded: name -> parameter.
    """
    replacements = {id(p): sharded[name] for name, p in full.items() if sharded[name] is not p}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [replacements.get(id(parameter), parameter) for parameter in group["params"]]
        for parameter in [parameter for parameter in optimizer.state if id(parameter) in replacements]:
            shard, state = replacements[id(parameter)], optimizer.state.pop(parameter)
            optimizer.state[shard] = {key: _sharded_as(value, shard) for key, value in state.items()}


def _sharded_as(value: object, parameter: nn.Parameter) -> object:
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor):
        return value
    with torch.no_grad():
        return materialized_as(value, parameter)


def zero_unreduced_too(optimizer: Optimizer, module: nn.Module) -> Callable[[], None]:
    """Let zero_grad drop gradients that accumulate without a sync too; return an undo."""
    # fully_shard keeps those on its own unsharded parameters, which the optimizer does not know.
    zero_grad = optimizer.zero_grad

    def zero_all(set_to_none: bool = True) -> None:
        zero_grad(set_to_none=set_to_none)
        updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for fsdp_module in fsdp_modules(module):
            for sharded, unsharded in sharded_and_unsharded_parameters(fsdp_module):
                if id(sharded) in updated:
                    drop_unreduced_gradient(unsharded)

    optimizer.zero_grad = zero_all  # type: ignore[method-assign]  # on the instance: the class's stays as it is
    return partial(delattr, optimizer, "zero_grad")


def draw_full(operator: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Do a random operator of torch, such as aten.normal_, on a DTensor; every rank draws all of it."""
    # torch draws shards on CPUs by each rank's own generator: with equal seeds all ranks have the same rows.
    target: DTensor = args[0]
    local = target.to_local()
    # bernoulli alone reads its values: they are probabilities.
    reads = operator.name() == "aten::bernoulli"
    full = target.full_tensor() if reads else torch.empty(target.shape, dtype=local.dtype, device=local.device)
    drawn: Tensor = operator(full, *args[1:], **options)
    for dim, (offset, length) in enumerate(zip(local_offsets(target), local.shape, strict=True)):
        drawn = drawn.narrow(dim, offset, length)
    # A sum over ranks that is not complete yet: the first one has the numbers, others 0.
    coordinates = target.device_mesh.get_coordinate() or ()
    if any(p.is_partial() and place for p, place in zip(target.placements, coordinates, strict=True)):
        drawn = torch.zeros_like(drawn)
    if not operator.name().split("::")[1].split(".")[0].endswith("_"):
        mesh, placements, shape = target.device_mesh, target.placements, target.shape
        return DTensor.from_local(drawn.clone(), mesh, placements, run_check=False, shape=shape, stride=target.stride())
    with torch.no_grad():
        local.copy_(drawn)
    return target
