"""What a forward keeps for its backward, and what remains of it where layers compute it again."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Layers = frozenset[str]


@dataclass
class SavedActivations:
    """Bytes of the storages that autograd saves, parameters and buffers excluded, and by which layers."""

    bytes_of: dict[int, int] = field(default_factory=dict)
    """Address of a storage -> its bytes: several saved tensors may be views of one."""
    savers: dict[int, list[Layers]] = field(default_factory=dict)
    """Address -> for each time that it is saved, the watched layers that run then."""
    inputs: dict[str, dict[int, int]] = field(default_factory=dict)
    """Path of a watched layer -> the storages that it is called with."""
    running: list[str] = field(default_factory=list)
    """The watched layers whose forward runs at the moment."""

    def kept(self, recomputed: Collection[str] = ()) -> int:
        """Return the bytes that stay for backward, where the layers at these paths keep their inputs alone."""
        again = set(recomputed)
        kept = {
            key: self.bytes_of[key]
            for key, savers in self.savers.items()
            if any(again.isdisjoint(running) for running in savers)
        }
        for path in again:
            kept |= self.inputs.get(path, {})
        return sum(kept.values())

    def of_layer(self, path: str) -> int:
        """Return the bytes that a layer's forward keeps beside its inputs."""
        inputs = self.inputs.get(path, {})
        savers = self.savers.items()
        return sum(
            self.bytes_of[key]
            for key, of_storage in savers
            if key not in inputs and any(path in running for running in of_storage)
        )

    def first_in(self, path: str) -> int:
        """Return the bytes that are saved in a layer before anywhere else."""
        return sum(self.bytes_of[key] for key, savers in self.savers.items() if path in savers[0])

    def around(self, paths: Collection[str]) -> tuple[int, int]:
        """Return the bytes that are saved outside of these layers, before the last of them and after it."""
        before = after = 0
        for key, savers in self.savers.items():  # in the order in which they are saved
            if not savers[0].isdisjoint(paths):
                before, after = before + after, 0
            else:
                after += self.bytes_of[key]
        return before, after

    def last_that_fit(self, paths: list[str], target: int) -> list[str]:
        """Return the layers that are left to compute again where as many of the last ones keep theirs as fit."""
        for number in range(len(paths) + 1):
            if self.kept(paths[:number]) <= target:
                return paths[:number]
        return paths


@contextmanager
def count_saved(module: nn.Module, watched: Mapping[str, nn.Module]) -> Iterator[SavedActivations]:
    """Count what autograd saves inside of the context. watched: path -> submodule whose share is asked for later."""
    found = SavedActivations()
    own = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and (key := tensor.untyped_storage().data_ptr()) not in own:
            found.bytes_of[key] = tensor.untyped_storage().nbytes()
            found.savers.setdefault(key, []).append(frozenset(found.running))
        return tensor

    def watch(path: str, layer: nn.Module, hooks: ExitStack) -> None:
        def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found.running.append(path)
            tensors = [value for value in [*args, *kwargs.values()] if isinstance(value, Tensor)]
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
            found.inputs[path] = {key: size for key, size in storages.items() if key not in own}

        def leave(*_: Any) -> None:
            found.running.remove(path)

        hooks.callback(layer.register_forward_pre_hook(enter, with_kwargs=True).remove)
        hooks.callback(layer.register_forward_hook(leave).remove)

    with ExitStack() as hooks, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for path, layer in watched.items():
            watch(path, layer, hooks)
        yield found
