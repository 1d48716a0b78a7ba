"""Shards a module's parameters over the ranks, block by block, by torch's fully_shard (FSDP2);
which are blocks."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning_utilities.core.apply_func import apply_to_collection
from rich.filesize import decimal
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from lightning_distrec._compat.lightning import set_device_and_mesh
from lightning_distrec._compat.torch import apply_to_tensors, broadcast_module_states, is_view
from lightning_distrec._compat.torch_distributed import make_fully_sharded_class
from lightning_distrec.checkpoint.lazy_tensors import materialized_as
from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.errors import ConfigError, UnsupportedError
from lightning_distrec.kept_parameters import kept_parameters, kept_up
from lightning_distrec.optimizers.gradient_hooks import move_in_backward_optimizers
from lightning_distrec.strategies.data_parallel.activations import (
    INDIVISIBLE,
    can_be_called,
    checkpointed_layers,
    named_layers,
    signature,
)
from lightning_distrec.strategies.data_parallel.gradient_exchange import sparse_weights
from lightning_distrec.strategies.fully_sharded.fsdp_options import (
    Dtypes,
    FSDPOptions,
    choose_dtypes,
)
from lightning_distrec.strategies.fully_sharded.shards import (
    STEPS,
    allow_deepcopy,
    gather_in_steps,
    gather_kept,
    guard,
    replace_parameters,
    reshard,
)

Wrap = Literal["auto"] | Sequence[str]
LARGE_BYTES = 2**20
"""Minimum size of replicated parameters that the log reports."""


def choose_blocks(module: nn.Module, wrap: Wrap, min_num_parameters: int) -> list[nn.Module]:
    """Return the blocks of a module, nested ones before those that contain them.

    wrap: "auto": submodules of at least min_num_parameters that either repeat (siblings of one
    class and shapes, as the layers of a transformer) or are single layers; or names of classes, and
    paths in the module. Raises ConfigError: there is no such class or path, or it shares a weight
    with the rest of the module.
    """
    holders = _holders(module)
    if wrap == "auto":
        return list(_auto_blocks(module, min_num_parameters, holders))
    blocks = named_layers(module, wrap, "wrap")
    for path, block in blocks.items():
        if not _shares_no_parameters(block, holders):
            raise ConfigError(
                f"wrap: '{path}' shares a weight with another submodule. Name one that contains "
                "both."
            )
    return [block for _, block in sorted(blocks.items(), key=lambda item: -item[0].count("."))]


def _auto_blocks(
    module: nn.Module, min_num_parameters: int, holders: dict[int, set[int]]
) -> Iterator[nn.Module]:
    siblings = Counter(map(signature, module.children()))
    for child in dict.fromkeys(module.children()):
        if (
            isinstance(child, FSDPModule)
            or sum(p.numel() for p in child.parameters()) < min_num_parameters
        ):
            continue
        is_layer = isinstance(child, INDIVISIBLE) or not any(True for _ in child.children())
        is_block = is_layer or siblings[signature(child)] > 1
        if is_block and can_be_called(child) and _shares_no_parameters(child, holders):
            yield child
        elif not isinstance(child, INDIVISIBLE):
            yield from _auto_blocks(child, min_num_parameters, holders)


def _holders(module: nn.Module) -> dict[int, set[int]]:
    """Return parameter's id -> ids of the modules that hold it directly; several where it is
    shared, or kept."""
    holders: dict[int, set[int]] = {}
    for submodule in module.modules():
        for parameter in submodule.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(id(submodule))
    for kept in kept_parameters(module):
        # What the root keeps in lists is meant for optimizers; submodules compute with it.
        if kept.module is not module:
            holders.setdefault(id(kept.parameter), set()).add(id(kept.module))
    return holders


def _shares_no_parameters(module: nn.Module, holders: dict[int, set[int]]) -> bool:
    """Whether nothing outside of a module holds its parameters too."""
    inside = set(map(id, module.modules()))
    return all(holders[id(parameter)] <= inside for parameter in module.parameters())


def choose_replicated(
    module: nn.Module, blocks: Iterable[nn.Module], automatic: bool
) -> dict[str, nn.Parameter]:
    """Return name -> parameter of those that fully_shard leaves out."""
    # These are scalars, which it refuses, and in manual optimization what is in no block: several
    # backwards may run in one step there, and the first would free it.
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    return {
        name: parameter
        for name, parameter in module.named_parameters()
        if not parameter.dim() or (not automatic and id(parameter) not in in_blocks)
    }


def refuse_lazy(module: nn.Module) -> None:
    """Raise ConfigError: a parameter has no shape yet."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ConfigError(
                f"'{name}' has no shape before the first forward (a lazy module). Run one batch "
                "through the module before fit, in configure_model for example, or give the layer "
                "its size."
            )


def refuse_module(module: nn.Module) -> None:
    """Raise ConfigError: a parameter has no shape yet.

    Raise UnsupportedError: gradients are sparse, or a tuple keeps a parameter.
    """
    refuse_lazy(module)
    parameters = set(module.parameters())
    for kept in kept_parameters(module):
        if kept.parameter in parameters:
            kept.refuse_fixed()
    sparse = list(sparse_weights(module).values())
    if sparse:
        raise UnsupportedError(
            f"'{sparse[0]}' has sparse gradients, which FSDP2 does not reduce. Use "
            "strategy='torchrec_sharded', which shards it and updates only the rows that were "
            "looked up, or sparse=False for it."
        )


def refuse_mixed_dtypes(module: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """Raise UnsupportedError: parameters that are gathered as one have several types."""
    paths = {id(submodule): path for path, submodule in module.named_modules()}
    in_blocks = {id(parameter) for block in blocks for parameter in block.parameters()}
    outside = [(name, p) for name, p in module.named_parameters() if id(p) not in in_blocks]
    groups = [(paths[id(block)], list(block.named_parameters())) for block in blocks]
    for path, parameters in [*groups, ("parameters outside of blocks", outside)]:
        names_by_dtype = {
            parameter.dtype: name for name, parameter in parameters if parameter.is_floating_point()
        }
        if len(names_by_dtype) > 1:
            named = ", ".join(
                f"'{name}' ({dtype})" for dtype, name in names_by_dtype.items()
            ).replace("torch.", "")
            raise UnsupportedError(
                f"{path}: {named} are of several types, and FSDP2 gathers one type at a time. Name "
                "blocks with one type each, wrap=[...], or convert the parameters."
            )


modules_in_step: "WeakSet[nn.Module]" = WeakSet()
"""Fully sharded modules of which the strategy runs a step now."""
_sharded_as: "WeakKeyDictionary[nn.Module, tuple[FSDPOptions, Dtypes]]" = WeakKeyDictionary()
"""Fully sharded module -> the options and types with which it was sharded."""


def shard_module(
    module: LightningModule,
    options: FSDPOptions,
    mesh: DeviceMesh,  # of all ranks
    device: torch.device,
    precision: str,
    consensus: Consensus,
) -> None:
    """Collective. Shard the module, with rank 0's weights, unless an earlier run has.

    Raises ConfigError, UnsupportedError on every rank: it cannot be sharded so, or was sharded
    otherwise.
    """
    settings = options, choose_dtypes(options, precision)
    if isinstance(module, FSDPModule):
        earlier = _sharded_as.get(module, settings)
        if earlier != settings:
            raise ConfigError(
                f"an earlier run has sharded this module as {earlier[0]}, computing in "
                f"{earlier[1].param or 'its own type'}; now it is {options}, in "
                f"{settings[1].param or 'its own type'}. Give the same options and precision, or "
                "call trainer.strategy.unshard() of that run first."
            )
        _broadcast_unsharded(module)  # buffers that the last step wrote to differ between ranks
    else:
        blocks = consensus.all_or_none("setup", lambda: _choose_blocks(module, options))
        replicated = choose_replicated(module, blocks, module.automatic_optimization)
        large = {name: p.nbytes for name, p in replicated.items() if p.nbytes >= LARGE_BYTES}
        if large:
            size = decimal(sum(large.values()))
            rank_zero_info(
                f"fsdp_tuned: {', '.join(large)} ({size}) are replicated: name their modules in "
                "wrap."
            )
        full = dict(module.named_parameters(remove_duplicate=False))
        with kept_up(module):
            _shard(module, blocks, set(replicated.values()), mesh, device, settings)
        sharded = dict(module.named_parameters(remove_duplicate=False))
        gather_kept(module)
        replace_parameters(move_in_backward_optimizers(full, sharded), full, sharded)
        gather_in_steps(module, [step for step in STEPS if is_overridden(step, module)])
        guard(module)
        _sharded_as[module] = settings
    set_device_and_mesh(module, device, mesh)


def _choose_blocks(module: nn.Module, options: FSDPOptions) -> list[nn.Module]:
    refuse_module(module)
    blocks = choose_blocks(module, options.wrap, options.min_num_parameters)
    refuse_mixed_dtypes(module, blocks)
    block_ids = set(map(id, blocks))
    paths = {}
    for path, submodule in module.named_modules():
        if id(submodule) in block_ids:
            paths[path] = submodule
    # raises where it cannot be
    checkpointed_layers(module, options.activation_checkpointing, paths)
    return blocks


def _shard(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    replicated: set[nn.Parameter],
    mesh: DeviceMesh,
    device: torch.device,
    settings: tuple[FSDPOptions, Dtypes],
) -> None:
    """Collective. Shard the parameters of each block, then the module's others, with rank 0's
    weights.

    blocks: nested ones first; one at a time is on the device unsharded. replicated: parameters to
    leave out.
    Raises ConfigError: what is on the meta device cannot be initialized.
    """
    reshards = settings[0].reshard_after_forward
    dtypes = settings[1]
    offload = (
        CPUOffloadPolicy(pin_memory=device.type != "cpu")
        if settings[0].offload
        else OffloadPolicy()
    )
    shard = partial(fully_shard, mesh=mesh, offload_policy=offload)
    inside: set[int] = set()
    for block in blocks:
        inside.update(id(inner) for inner in block.modules() if inner is not block)
    for block in blocks:
        policy = dtypes.block_policy(is_nested=id(block) in inside)
        reshards_block = block is not blocks[-1] if reshards == "auto" else reshards
        _shard_one(block, partial(shard, mp_policy=policy), replicated, reshards_block, device)
    _shard_one(module, partial(shard, mp_policy=dtypes.root_policy()), replicated, False, device)


def _shard_one(
    module: nn.Module,
    shard: Callable[..., Any],
    replicated: set[nn.Parameter],
    reshards: bool,
    device: torch.device,
) -> None:
    materialize(module, device)
    apply_to_tensors(
        module, lambda tensor: tensor if isinstance(tensor, DTensor) else tensor.to(device)
    )
    _broadcast_unsharded(module)
    make_fully_sharded_class(type(module))
    # hooks run in the order of registration: before fully_shard's
    module.register_forward_hook(_copy_views)
    shard(module, reshard_after_forward=reshards, ignored_params=replicated or None)
    module.register_forward_hook(_reshard_without_backward)
    module.register_load_state_dict_pre_hook(_load_shards)
    allow_deepcopy(module, partial(shard, reshard_after_forward=True))


def _broadcast_unsharded(module: nn.Module) -> None:
    """Collective. Give every rank rank 0's buffers, and its parameters that are not sharded."""
    broadcast_module_states(
        module, [name for name, p in module.named_parameters() if isinstance(p, DTensor)]
    )


def _copy_views(_: nn.Module, __: Any, outputs: Any) -> Any:
    """Return a block's outputs, views replaced by copies."""
    if not torch.is_grad_enabled():
        return outputs
    # fully_shard attaches the all-gather for backward to a block's outputs as an autograd hook, and
    # an in-place operation on a view drops such a hook. Can go when _register_pre_backward_hook no
    # longer warns about it.
    return apply_to_collection(
        outputs,
        Tensor,
        lambda t: t.clone() if t.requires_grad and is_view(t) else t,
        allow_frozen=True,
    )


def _reshard_without_backward(module: Any, _: Any, __: Any) -> None:
    """Free what no backward will free: weights may change before the next forward."""
    # A module in a step keeps its own parameters until the step ends, since the step may use them
    # after its forward.
    if not torch.is_grad_enabled() and module not in modules_in_step:
        module.reshard()


def _load_shards(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let load_state_dict take full tensors, and lazy ones of a checkpoint, of which this rank
    reads its shard."""
    reshard(module)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for key in [key for key in state if key.startswith(prefix)]:
        state[key] = materialized_as(state[key], parameters.get(key[len(prefix) :]))


def materialize(
    module: nn.Module,
    device: torch.device,
    is_missing: Callable[[str, Tensor], bool] = lambda _, tensor: tensor.is_meta,
) -> None:
    """Give what is on the meta device memory, and the initial weights that its own
    `reset_parameters` draws.

    is_missing: whether a tensor of a name has to get memory. Raises ConfigError: a module has no
    `reset_parameters`.
    """
    for path, submodule in module.named_modules():
        prefix = f"{path}." if path else ""
        tensors = [
            *submodule.named_parameters(recurse=False),
            *submodule.named_buffers(recurse=False),
        ]
        if not any(is_missing(f"{prefix}{name}", tensor) for name, tensor in tensors):
            continue
        reset = getattr(submodule, "reset_parameters", None) or getattr(
            submodule, "_reset_parameters", None
        )
        if reset is None:
            raise ConfigError(
                f"'{path or type(module).__name__}' ({type(submodule).__name__}) is on the meta "
                "device and has no reset_parameters() to draw its initial weights. Give it one, or "
                "build it on the host."
            )
        submodule.to_empty(device=device, recurse=False)
        reset()
