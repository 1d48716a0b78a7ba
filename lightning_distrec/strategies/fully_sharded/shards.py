"""The shards of a module's parameters after fully_shard: freed, drawn into, updated, copied, and
made full again."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_exporting
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.jit import is_tracing
from torch.optim import Optimizer

from lightning_distrec._compat.lightning import set_device_and_mesh
from lightning_distrec._compat.tensors import local_offsets
from lightning_distrec._compat.torch import apply_to_tensors
from lightning_distrec._compat.torch_distributed import (
    assign_to,
    class_before_fully_shard,
    drop_state_dict_hooks,
    drop_unreduced_gradient,
    reset_after_failure,
    sharded_and_unsharded_parameters,
    undo_fully_shard,
    without_fully_shard,
)
from lightning_distrec.checkpoint.lazy_tensors import materialized_as
from lightning_distrec.chunks import refuse_module, refuse_pickling
from lightning_distrec.errors import ConfigError
from lightning_distrec.kept_parameters import KeptParameter, kept_parameters, kept_up
from lightning_distrec.module_shards import tables_of_modules
from lightning_distrec.optimizers.gradient_hooks import note_replaced
from lightning_distrec.optimizers.step_hooks import refuse_inexact_optimizers


def fsdp_modules(module: nn.Module) -> list[FSDPModule]:
    """Return the module and submodules that fully_shard was called with."""
    return [submodule for submodule in module.modules() if isinstance(submodule, FSDPModule)]


def reshard(module: nn.Module) -> None:
    """Free what a forward without a backward has left gathered, so that the module's parameters are
    the shards."""
    for fsdp_module in fsdp_modules(module):
        fsdp_module.reshard()


def drop_unfinished_step(module: nn.Module) -> None:
    """Reset a fully sharded module that a failed run may have left with gathered parameters and
    unreduced gradients."""
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
                f"{strategy}: '{name}' was sharded over the ranks by an earlier run under FSDP, "
                "and stays so. Call trainer.strategy.unshard() of that run first, or build a new "
                "module."
            )


def refuse_absent(module: nn.Module, strategy: str) -> None:
    """Raise ConfigError: an earlier run has left the weights of other stages without values."""
    for name, parameter in module.named_parameters():
        if getattr(parameter, "is_absent", False):  # AbsentTensor's, of pipeline/
            raise ConfigError(
                f"{strategy}: '{name}' has no values on this rank, because an earlier run under "
                "pipeline_parallel kept those of its stage. Call trainer.strategy.unshard() of "
                "that run first, or build a new module."
            )


def refuse_sharded_tables(module: nn.Module, strategy: str) -> None:
    """Raise ConfigError: an earlier run has sharded the module's tables, which would be averaged
    with unlike rows."""
    tables = tables_of_modules.get(module)
    if tables is not None:
        raise ConfigError(
            f"{strategy}: tables of '{next(iter(tables.sharded))}' were sharded over the ranks by "
            "an earlier run under torchrec_sharded, and stay so. Call trainer.strategy.unshard() "
            "of that run first, or build a new module."
        )


def refuse_optimizers(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    """Raise where optimizers would not update the sharded parameters, or with other numbers.

    ConfigError: they hold parameters of before sharding. UnsupportedError: see
    refuse_inexact_optimizers.
    """
    refuse_inexact_optimizers(optimizers)
    refuse_stale(optimizers, module, ConfigError)


def refuse_stale(
    optimizers: Sequence[Optimizer], module: nn.Module, error: type[Exception]
) -> None:
    """Raise `error`: an optimizer holds parameters that set-up has replaced, and would update no
    module."""
    current = set(map(id, module.parameters()))
    for optimizer in optimizers:
        for i, group in enumerate(optimizer.param_groups):
            stale = [tuple(p.shape) for p in group["params"] if id(p) not in current]
            if stale:
                raise error(
                    f"configure_optimizers gave {type(optimizer).__name__}, param group {i}, a "
                    f"parameter of shape {stale[0]} that is not in the module, whose parameters "
                    "are replaced in set-up. Take them from self.parameters() in "
                    "configure_optimizers, not from a list that was made before."
                )


def swap_parameters(
    module: nn.Module, make: Callable[[str, nn.Parameter], nn.Parameter | None]
) -> None:
    """Put what `make` returns for a name and its parameter in its place; None: leave it. Shared
    ones stay shared."""
    # With the earlier parameters, so that none is freed: a new one could have its id.
    swapped: dict[int, tuple[nn.Parameter, nn.Parameter | None]] = {}
    with kept_up(module):
        for path, submodule in module.named_modules():
            parameters = submodule.named_parameters(path, recurse=False, remove_duplicate=False)
            for name, parameter in list(parameters):
                if id(parameter) not in swapped:
                    swapped[id(parameter)] = parameter, make(name, parameter)
                new = swapped[id(parameter)][1]
                if new is not None:
                    setattr(submodule, name.rpartition(".")[2], new)
                    note_replaced(parameter, new)


def gather_kept(module: nn.Module) -> None:
    """Let the dicts, lists and attributes that keep sharded parameters have their gathered forms
    while FSDP2 does."""
    places: dict[int, list[KeptParameter]] = {}
    for kept in kept_parameters(module):
        places.setdefault(id(kept.parameter), []).append(kept)
    for fsdp_module in fsdp_modules(module) if places else []:
        assign_to(fsdp_module, places)


def full_or_meta(full: Mapping[str, Tensor], name: str, parameter: nn.Parameter) -> nn.Parameter:
    """Return a plain parameter with the value of this name, or without values on the meta
    device."""
    value = full.get(name)
    if value is None:
        value = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    return nn.Parameter(value, parameter.requires_grad)


def replace_parameters(
    optimizers: Sequence[Optimizer],
    full: Mapping[str, nn.Parameter],
    sharded: Mapping[str, nn.Parameter],
) -> None:
    """Let optimizers update a module's parameters after sharding in place of those before.

    State that exists already, of a loaded checkpoint for example, is sharded as its parameter is.
    full, sharded: name -> parameter.
    """
    replacements = {id(p): sharded[name] for name, p in full.items() if sharded[name] is not p}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [
                replacements.get(id(parameter), parameter) for parameter in group["params"]
            ]
        for parameter in [
            parameter for parameter in optimizer.state if id(parameter) in replacements
        ]:
            shard = replacements[id(parameter)]
            state = optimizer.state.pop(parameter)
            optimizer.state[shard] = {
                key: _sharded_as(value, shard) for key, value in state.items()
            }


def _sharded_as(value: object, parameter: nn.Parameter) -> object:
    if not isinstance(value, Tensor) or not isinstance(parameter, DTensor):
        return value
    with torch.no_grad():
        return materialized_as(value, parameter)


def zero_unreduced_too(
    optimizer: Optimizer, modules: Sequence[FSDPModule], are_left: Callable[[], bool]
) -> Callable[[], None]:
    """Let zero_grad drop gradients that accumulate without a sync too; return an undo.

    modules: those that fully_shard was called with. are_left: whether they may have such gradients.
    """
    # fully_shard keeps those on its own unsharded parameters, which the optimizer does not know.
    zero_grad = optimizer.zero_grad

    def zero_all(set_to_none: bool = True) -> None:
        zero_grad(set_to_none=set_to_none)
        if not are_left():
            return
        updated = set()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                updated.add(id(parameter))
        for fsdp_module in modules:
            for sharded, unsharded in sharded_and_unsharded_parameters(fsdp_module):
                if id(sharded) in updated:
                    drop_unreduced_gradient(unsharded)

    # On the instance: the class's stays as it is.
    optimizer.zero_grad = zero_all  # type: ignore[method-assign]
    return partial(delattr, optimizer, "zero_grad")


def draw_full(operator: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Do a random operator of torch, such as aten.normal_, on a DTensor; every rank draws all of
    it."""
    # torch draws shards on CPUs by each rank's own generator: with equal seeds all ranks have the
    # same rows.
    target: DTensor = args[0]
    local = target.to_local()
    # bernoulli alone reads its values: they are probabilities.
    reads = operator.name() == "aten::bernoulli"
    full = (
        target.full_tensor()
        if reads
        else torch.empty(target.shape, dtype=local.dtype, device=local.device)
    )
    drawn: Tensor = operator(full, *args[1:], **options)
    for dim, (offset, length) in enumerate(zip(local_offsets(target), local.shape, strict=True)):
        drawn = drawn.narrow(dim, offset, length)
    # A sum over ranks that is not complete yet: the first one has the numbers, others 0.
    coordinates = target.device_mesh.get_coordinate() or ()
    if any(
        p.is_partial() and place for p, place in zip(target.placements, coordinates, strict=True)
    ):
        drawn = torch.zeros_like(drawn)
    if not operator.name().split("::")[1].split(".")[0].endswith("_"):
        mesh = target.device_mesh
        placements = target.placements
        shape = target.shape
        return DTensor.from_local(
            drawn.clone(), mesh, placements, run_check=False, shape=shape, stride=target.stride()
        )
    with torch.no_grad():
        local.copy_(drawn)
    return target


GUARDS = ("__reduce_ex__", "__prepare_scriptable__")
ShardCopy = Callable[..., Any]
"""Shards a copy on the meta device as the original was. `ignored_params`: its parameters that stay
replicated."""
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def guard(root: nn.Module) -> None:
    """Let pickle, torch.jit and torch.export raise ShardingError for the module, its blocks and its
    shards."""
    names = {id(parameter): name for name, parameter in root.named_parameters()}
    for parameter in root.parameters():
        if isinstance(parameter, DTensor):
            refuse_pickling(parameter, names[id(parameter)])
    for path, module in root.named_modules():
        if any(isinstance(parameter, DTensor) for parameter in module.parameters(recurse=False)):
            module.register_state_dict_post_hook(_guard_state)
        if isinstance(module, FSDPModule):
            name = path or class_before_fully_shard(root).__name__
            # Written into `__dict__`: pickle and torch.jit.script look them up on the object, and
            # the class stays.
            vars(module)["__reduce_ex__"] = partial(refuse_module, "pickled", name)
            vars(module)["__prepare_scriptable__"] = partial(refuse_module, "scripted", name)
    root.register_forward_pre_hook(_refuse_export, prepend=True)  # before fully_shard's


def _guard_state(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for name, _parameter in module.named_parameters(recurse=False):
        value = state.get(f"{prefix}{name}")
        if isinstance(value, DTensor):
            refuse_pickling(value, f"{prefix}{name}")


def _refuse_export(module: nn.Module, _: Any) -> None:
    if is_exporting() or is_tracing():
        refuse_module("exported or traced", class_before_fully_shard(module).__name__)


def allow_deepcopy(module: nn.Module, shard_copy: ShardCopy) -> None:
    """Give a fully sharded module a `copy.deepcopy` of its own, which averages of weights need.

    A copy is sharded as the original is, and can run; between its forwards, each rank has its shard
    of it.
    """

    # fully_shard's class has a __deepcopy__ that raises. An attribute of the instance takes its
    # place, because copy.deepcopy looks the method up on the object.
    module.__deepcopy__ = lambda memo: _copied(module, memo, shard_copy)  # type: ignore[assignment]


def gather_in_steps(module: nn.Module, steps: list[str]) -> None:
    """Let these methods of a fully sharded module gather the parameters outside of blocks, as its
    forward does."""
    for step in steps:
        users_step = inspect.unwrap(getattr(module, step))
        register_fsdp_forward_method(module, step)
        # Lightning reads a step's arguments through `__wrapped__`, one level deep, and torch's
        # wrapper has another wrapper below it where the user's step is decorated.
        getattr(module, step).__func__.__wrapped__ = users_step


def _copied(original: Any, memo: dict[int, Any], shard_copy: ShardCopy) -> nn.Module:
    """Return a copy: of the class and attributes before fully_shard, sharded again, with the
    original's values."""
    original.reshard()
    # fully_shard has swapped the module's class for one that cannot be instantiated, so the copy
    # begins as the user's class. __new__ and __setstate__ go by copy.deepcopy's own protocol,
    # without the user's __init__.
    users_class = class_before_fully_shard(original)
    copied: nn.Module = users_class.__new__(users_class)
    memo[id(original)] = copied
    kind: Any = type(original)
    reduced: Any = kind.__reduce_ex__(original, 4)  # the instance's own refuses, see guard
    state = without_fully_shard(reduced[2])
    steps = [name for name in STEPS if name in state]
    # they are bound to the original; the copy gets its own below
    for name in ("__deepcopy__", *steps):
        state.pop(name, None)
    # torch copies no DTensor whose gradient is one: gradients are put aside.
    gradients = {
        name: p.grad
        for name, p in _shards_outside_of_blocks(original).items()
        if p.grad is not None
    }
    for name in gradients:
        original.get_parameter(name).grad = None
    copied.__setstate__(copy.deepcopy(state, memo))
    for name, gradient in gradients.items():
        original.get_parameter(name).grad = gradient
    with kept_up(copied):
        shards = _replace_by_meta(copied)
        replicated = {
            p for p in copied.parameters() if not isinstance(p, DTensor) and not p.is_meta
        }
        shard_copy(copied, ignored_params=replicated or None)
    gather_kept(copied)
    # What is copied next, and keeps one of these parameters, gets the copy's.
    memo.update({id(p): copied.get_parameter(name) for name, p in original.named_parameters()})
    device = next((shard.device for shard in shards.values()), None)
    apply_to_tensors(
        copied, lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor
    )
    for name, shard in shards.items():
        parameter: Any = copied.get_parameter(name)
        with torch.no_grad():
            parameter.to_local().copy_(shard.to_local())
    for name, gradient in gradients.items():
        copied.get_parameter(name).grad = gradient.clone()
    gather_in_steps(copied, steps)
    allow_deepcopy(copied, shard_copy)
    return copied


def _replace_by_meta(module: nn.Module) -> dict[str, DTensor]:
    """Replace the sharded parameters outside of nested blocks by full ones without memory, which
    fully_shard takes.

    Returns name -> sharded parameter. Parameters that are shared stay shared.
    """
    shards: dict[str, DTensor] = {}
    full: dict[int, nn.Parameter] = {}
    for path, submodule in _outside_of_blocks(module, ""):
        drop_state_dict_hooks(submodule)
        for name, parameter in submodule.named_parameters(recurse=False):
            if isinstance(parameter, DTensor):
                shards.setdefault(f"{path}{name}", parameter)
                if id(parameter) not in full:
                    full[id(parameter)] = full_or_meta({}, name, parameter)
                setattr(submodule, name, full[id(parameter)])
    return shards


def _shards_outside_of_blocks(module: nn.Module) -> dict[str, DTensor]:
    named = [
        (f"{path}{name}", parameter)
        for path, submodule in _outside_of_blocks(module, "")
        for name, parameter in submodule.named_parameters(recurse=False)
    ]
    return {name: parameter for name, parameter in named if isinstance(parameter, DTensor)}


def _outside_of_blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the prefix of parameters' names and the submodule, for all that are not inside of a
    nested block."""
    yield prefix, module
    for name, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield from _outside_of_blocks(child, f"{prefix}{name}.")


def unshard_module(module: nn.Module, full: Mapping[str, Tensor]) -> None:
    """Replace the shards of a LightningModule's parameters, and remove what fully_shard and we have
    added to it.

    full: the full parameters by name, on the host; others are without values, on the meta device.
    """
    drop_unfinished_step(module)
    swap_parameters(
        module, lambda name, p: full_or_meta(full, name, p) if isinstance(p, DTensor) else None
    )
    found_steps = {name: _users_step(module, name) for name in STEPS}
    users_steps = {name: step for name, step in found_steps.items() if step is not None}
    is_sharded = isinstance(module, FSDPModule)
    for submodule in list(module.modules()) if is_sharded else []:
        added = ("__deepcopy__", *GUARDS) if isinstance(submodule, FSDPModule) else ()
        undo_fully_shard(
            submodule, str(__package__), (*added, *STEPS) if submodule is module else added
        )
    vars(module).update(users_steps)
    set_device_and_mesh(module, torch.device("cpu"), None)


def _users_step(module: nn.Module, name: str) -> Any:
    """Return a step that the user has set on the instance; None: the class's. `gather_in_steps` has
    wrapped it."""
    wrapper = vars(module).get(name)
    step = getattr(getattr(wrapper, "__func__", None), "__wrapped__", None)
    return None if getattr(step, "__self__", None) is module else step
