"""What one batch shows about a training step: its samples, the bytes kept for backward, and the
lookups in tables."""

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_distrec.sharding.proxies import FEATURE
from lightning_distrec.units import describe_error

Layers = frozenset[str]
Enter = Callable[[str, tuple[Any, ...], dict[str, Any]], None]
Leave = Callable[[str, tuple[Any, ...], Any], None]


@contextmanager
def watch_modules(
    modules: Mapping[str, nn.Module], enter: Enter | None, leave: Leave
) -> Iterator[None]:
    """Call enter(path, args, kwargs) before each module's forward inside, and leave(path, args,
    output) after it."""
    with ExitStack() as hooks:
        for path, module in modules.items():
            # The path as a default, since a closure in a loop would see the last one. A hook that
            # returns None changes neither arguments nor output.
            if enter is not None:
                handle = module.register_forward_pre_hook(
                    lambda _, args, kwargs, path=path: enter(path, args, kwargs), with_kwargs=True
                )
                hooks.callback(handle.remove)
            handle = module.register_forward_hook(
                lambda _, args, output, path=path: leave(path, args, output)
            )
            hooks.callback(handle.remove)
        yield


@dataclass
class SavedActivations:
    """Bytes of the storages that autograd saves, parameters and buffers excluded, and by which
    layers."""

    bytes_of: dict[int, int] = field(default_factory=dict)
    """Address of a storage -> its bytes: several saved tensors may be views of one."""
    savers: dict[int, list[Layers]] = field(default_factory=dict)
    """Address -> for each time that it is saved, the watched layers that run then."""
    inputs: dict[str, dict[int, int]] = field(default_factory=dict)
    """Path of a watched layer -> the storages that it is called with."""
    running: list[str] = field(default_factory=list)
    """The watched layers whose forward runs at the moment."""

    def retained_bytes(self, recomputed: Collection[str] = ()) -> int:
        """Return the bytes that stay for backward, where the layers at these paths keep their
        inputs alone."""
        recomputed_set = set(recomputed)
        # A storage stays if it is saved at least once while no layer that computes again runs.
        stored: dict[int, int] = {}
        for key, savers in self.savers.items():
            if any(map(recomputed_set.isdisjoint, savers)):
                stored[key] = self.bytes_of[key]
        for path in recomputed_set:
            # Checkpointing keeps the inputs of a layer in place of what its forward saves.
            stored |= self.inputs.get(path, {})
        return sum(stored.values())

    def layer_bytes(self, path: str) -> int:
        """Return the bytes that a layer's forward keeps beside its inputs."""
        inputs = self.inputs.get(path, {})
        num_bytes = 0
        for key, savers in self.savers.items():
            is_saved = any(path in running for running in savers)
            if is_saved and key not in inputs:
                num_bytes += self.bytes_of[key]
        return num_bytes

    def bytes_saved_first_in(self, path: str) -> int:
        """Return the bytes that are saved in a layer before anywhere else."""
        return sum(self.bytes_of[key] for key, savers in self.savers.items() if path in savers[0])

    def bytes_around(self, paths: Collection[str]) -> tuple[int, int]:
        """Return the bytes that are saved outside of these layers, before the last of them and
        after it."""
        head = tail = 0
        for key, savers in self.savers.items():  # in the order in which they are saved
            if not savers[0].isdisjoint(paths):
                head, tail = head + tail, 0
            else:
                tail += self.bytes_of[key]
        return head, tail


@contextmanager
def count_saved(module: nn.Module, watched: Mapping[str, nn.Module]) -> Iterator[SavedActivations]:
    """Count what autograd saves inside of the context. watched: path -> submodule whose share is
    asked for later."""
    activations = SavedActivations()
    parameter_storages = {
        t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]
    }

    def pack(tensor: Tensor) -> Tensor:
        # Sparse tensors have no storage. What is saved lives as long as the graph, so that
        # addresses differ.
        if tensor.layout != torch.strided:
            return tensor
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in parameter_storages:
            activations.bytes_of[key] = storage.nbytes()
            activations.savers.setdefault(key, []).append(frozenset(activations.running))
        return tensor

    def enter(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        activations.running.append(path)
        tensors = [value for value in [*args, *kwargs.values()] if isinstance(value, Tensor)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        activations.inputs[path] = {
            key: size for key, size in storages.items() if key not in parameter_storages
        }

    def leave(path: str, args: tuple[Any, ...], output: Any) -> None:
        activations.running.remove(path)

    # The hooks see every tensor that autograd keeps for backward; unpacking returns it as it is.
    with (
        watch_modules(watched, enter, leave),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        yield activations


@dataclass(frozen=True)
class BlockProfile:
    """Of each block of an nn.Sequential or nn.ModuleList, by its path."""

    input_bytes: dict[str, int] = field(default_factory=dict)
    """Of its first argument."""
    follows: set[str] = field(default_factory=set)
    """Those whose first argument is the very output of the block before."""


def numbered_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return path -> block of all nn.Sequentials and nn.ModuleLists in a module."""
    blocks: dict[str, nn.Module] = {}
    for name, container in module.named_modules():
        if name and isinstance(container, (nn.Sequential, nn.ModuleList)):
            for number, block in enumerate(container):
                blocks[f"{name}.{number}"] = block
    return blocks


@contextmanager
def watch_blocks(module: nn.Module, profile: BlockProfile) -> Iterator[None]:
    """Record what the blocks of a module get while they run inside."""
    # Held for the whole step: `is` below could meet another object at the address of one that was
    # freed.
    outputs: dict[str, Any] = {}

    def enter(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if args and isinstance(args[0], Tensor):
            profile.input_bytes[path] = args[0].numel() * args[0].itemsize
            container, _, number = path.rpartition(".")
            # The very object: an equal one may have passed through code between the blocks.
            if outputs.get(f"{container}.{int(number) - 1}") is args[0]:
                profile.follows.add(path)

    def leave(path: str, args: tuple[Any, ...], output: Any) -> None:
        outputs[path] = output

    with watch_modules(numbered_blocks(module), enter, leave):
        yield


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """What is known about a training step on one rank."""

    batch_size: int | None = None
    activation_bytes: int | None = None
    """What a forward keeps for its backward, without parameters; None: not measured."""
    saved: SavedActivations | None = None
    """The same by layers."""
    lookups: dict[str, Counter[str]] = field(default_factory=dict)
    """Path of a module with tables -> feature -> integers that are sent: ids, and the length of
    each bag."""
    blocks: BlockProfile | None = None
    """Of the blocks of containers; None: no step was run."""
    notes: tuple[str, ...] = ()
    """What could not be measured, and why."""


MANUAL = (
    "activations are left out: with automatic_optimization=False, training_step steps optimizers "
    "itself: no step was "
    "run; leave memory for what the forwards before one backward keep"
)


def profile_step(
    module: LightningModule,
    batch: Any,
    batch_size: int | None,
    precision: str,
    layers: Mapping[str, nn.Module] = MappingProxyType({}),
) -> StepProfile:
    """Run a training step with this batch and return what it keeps for its backward and looks up;
    drop its gradients.

    The step runs on the module itself: its buffers may change. layers: those that may compute their
    activations again, by path.
    """
    if any(parameter.is_meta for parameter in module.parameters()):
        return StepProfile(
            batch_size=batch_size,
            notes=("activations are left out: the module is on the meta device",),
        )
    if not module.automatic_optimization:
        # It steps optimizers by itself, which only a Trainer sets up, or which would change the
        # weights here.
        return StepProfile(batch_size=batch_size, notes=(MANUAL,))
    lookups: dict[str, Counter[str]] = {}
    batch_sizes: list[int] = []
    blocks = BlockProfile()
    # bfloat16 for 16-mixed too, which Lightning does not run on a CPU: activations take the same
    # bytes.
    autocast = (
        torch.autocast(module.device.type, torch.bfloat16)
        if precision.endswith("-mixed")
        else nullcontext()
    )
    try:
        with (
            _count_lookups(module, lookups, batch_sizes),
            watch_blocks(module, blocks),
            count_saved(module, {**numbered_blocks(module), **layers}) as saved,
            autocast,
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")  # self.log without a Trainer
            loss = module.training_step(batch, 0)
            loss = loss["loss"] if isinstance(loss, dict) else loss
            # Before backward, which frees what forward has saved, layer by layer.
            activation_bytes = saved.retained_bytes()
            if isinstance(loss, Tensor):
                loss.backward()
    except Exception as error:
        reason = describe_error(error)
        note = (
            "activations are left out: training_step failed on a batch without a Trainer "
            f"({reason})"
        )
        return StepProfile(batch_size=batch_size, lookups=lookups, notes=(note,))
    finally:
        module.zero_grad(set_to_none=True)
    # a lookup's stride is the batch size; the caller's is only the first tensor's length
    if batch_sizes:
        batch_size = batch_sizes[0]
    return StepProfile(
        batch_size=batch_size,
        activation_bytes=activation_bytes,
        saved=saved,
        lookups=lookups,
        blocks=blocks,
    )


@contextmanager
def _count_lookups(
    module: nn.Module, lookups: dict[str, Counter[str]], batch_sizes: list[int]
) -> Iterator[None]:
    """Record what every embedding and collection of the module looks up, and the batch sizes of
    collections' inputs."""

    def leave(path: str, args: tuple[Any, ...], output: Any) -> None:
        counted = lookups.setdefault(path, Counter())
        features: Any = args[0] if args else None
        if isinstance(features, Tensor):
            counted[FEATURE] += features.numel()
        elif hasattr(features, "length_per_key"):  # a KeyedJaggedTensor
            batch_sizes.append(int(features.stride()))
            for feature, ids in zip(features.keys(), features.length_per_key(), strict=True):
                counted[feature] += ids + features.stride()

    collections = {
        path: submodule
        for path, submodule in module.named_modules()
        if isinstance(submodule, (nn.Embedding, nn.EmbeddingBag))
        or hasattr(submodule, "embedding_bag_configs")
        or hasattr(submodule, "embedding_configs")
    }
    with watch_modules(collections, None, leave):
        yield
