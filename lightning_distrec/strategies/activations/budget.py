"""Activation checkpointing within a memory target: only as many layers recompute as it takes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_distrec.cluster.consensus import Consensus
from lightning_distrec.strategies.activations.checkpointing import (
    buffers_as_before,
    checkpoint_activations,
    is_checkpointed,
)
from lightning_distrec.strategies.activations.layers import ActivationCheckpointing, checkpointed_layers, target_bytes
from lightning_distrec.units import format_bytes, quantity

T = TypeVar("T")
NOTHING = nullcontext()
Storages = dict[int, int]
"""Address of a storage -> its bytes: several saved tensors may be views of one."""


class CheckpointedLayers:
    """The layers of a module that recompute their activations, from a run's `setup` to its end.

    With a target, the first training step checkpoints all and measures what each would keep; from the second on, the
    last layers keep their activations, as many as fit: those of the first ones live longest.

    usable_bytes: what "auto" may use, asked after the first step. blocks: path -> block of FSDP2; None: no FSDP2.
    """

    def __init__(
        self,
        module: nn.Module,
        option: ActivationCheckpointing,
        consensus: Consensus,
        blocks: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self._module = module
        self._layers = checkpointed_layers(module, option, blocks)
        self._consensus = consensus
        self._target = target_bytes(option)
        self.usable_bytes: Callable[[], int] = lambda: 0
        self.measures = isinstance(option, str)
        """Whether it is still to be decided which layers recompute."""
        self._bytes: dict[str, int] = {}
        self._outside: Storages = {}
        self._forwards = {path: vars(layer).get("forward") for path, layer in self._layers.items()}
        checkpoint_activations(self._layers.values())
        for path, layer in self._layers.items() if self.measures else ():
            layer.forward = partial(self._measured, path, layer, layer.forward)

    def __deepcopy__(self, memo: Any) -> "CheckpointedLayers":
        return self  # copies of layers refer to it

    @property
    def checkpointed(self) -> list[str]:
        """The paths of the layers that recompute."""
        return [path for path, layer in self._layers.items() if is_checkpointed(layer)]

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around the forward of a training step while `measures` is True. Collective before the second one."""
        if self._outside:
            self._decide()
            yield
            return
        found: Storages = {0: 0}
        with _counting(found, _addresses(self._module)):
            yield
        self._outside |= found

    def around(self, step: Callable[[], T]) -> T:
        """Run the forward of a training step inside of `step`."""
        with self.step():
            return step()

    def _decide(self) -> None:
        """Collective. Let as many of the last layers keep their activations as fit."""
        self.measures = False
        target = self.usable_bytes() if self._target is None else self._target
        paths, kept, num_kept = list(self._layers), sum(self._outside.values()), 0
        for path in reversed(paths):
            if kept + self._bytes.get(path, 0) > target:
                break
            kept += self._bytes.get(path, 0)
            num_kept += 1
        # The same on all ranks, because a layer may run collectives of its own each time that it is computed.
        recomputed = paths[: len(paths) - self._consensus.all_reduce_min(num_kept)]
        self.undo()
        checkpoint_activations(self._layers[path] for path in recomputed)
        names = f" ({recomputed[0]} to {recomputed[-1]})" if recomputed else ""
        over = "" if kept <= target else ", which all layers together do not reach"
        rank_zero_info(
            f"activation checkpointing: {len(recomputed)} of {quantity(len(paths), 'layer')} recompute{names}. A step "
            f"keeps about {format_bytes(kept)} of activations; the target is {format_bytes(target)}{over}."
        )

    def _measured(self, path: str, layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer's forward, which recomputes; the first time, measure before what it would keep."""
        if torch.is_grad_enabled() and path not in self._bytes:
            inputs = [tensor for tensor in [*args, *kwargs.values()] if isinstance(tensor, Tensor)]
            self._outside |= _of(inputs)
            found: Storages = {}
            own = _addresses(self._module) | _of(inputs).keys()
            with _as_if_never(layer, inputs), _counting(found, own):
                outputs = forward.args[0](*args, **kwargs)  # type: ignore[attr-defined]
            del outputs
            self._bytes[path] = sum(found.values())
        return forward(*args, **kwargs)

    def undo(self) -> None:
        """Let the layers compute as they did before."""
        for path, layer in self._layers.items():
            vars(layer).pop("forward", None)
            if (own := self._forwards[path]) is not None:
                layer.forward = own


@contextmanager
def _as_if_never(layer: nn.Module, inputs: list[Tensor]) -> Iterator[None]:
    """Leave buffers and random numbers as they were before the context."""
    devices = {tensor.device.index for tensor in inputs if tensor.device.type == "cuda"}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[index for index in devices if index is not None]))
        stack.enter_context(buffers_as_before(layer))
        yield


@contextmanager
def _counting(found: Storages, own: set[int]) -> Iterator[None]:
    """Count the bytes that autograd saves inside, but for those at the addresses `own`."""

    def pack(tensor: Tensor) -> Tensor:
        if tensor.layout == torch.strided and (key := tensor.untyped_storage().data_ptr()) not in own:
            found[key] = tensor.untyped_storage().nbytes()
        return tensor.detach()  # an output that its own node saves would keep that node, and itself, alive

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _of(tensors: list[Tensor]) -> Storages:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def _addresses(module: nn.Module) -> set[int]:
    """Return where parameters and buffers are now: gathered parameters move."""
    tensors = [*module.parameters(), *module.buffers()]
    return {t.untyped_storage().data_ptr() for t in tensors if type(t) in (Tensor, nn.Parameter)}


class NothingCheckpointed:
    """In the place of CheckpointedLayers where no layer is checkpointed."""

    measures = False
    usable_bytes: Callable[[], int]

    def around(self, step: Callable[[], T]) -> T:
        """Run a step."""
        return step()

    def step(self) -> AbstractContextManager[None]:
        """Do nothing around a step."""
        return NOTHING

    def undo(self) -> None:
        """Undo nothing."""
