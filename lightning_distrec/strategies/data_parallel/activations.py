"""Activation checkpointing: layers save no activations for backward, which runs their forward
again.

`activation_checkpointing` names them, or asks for those that repeat."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_distrec._compat.torch import version_of
from lightning_distrec._compat.torch_distributed import class_before_fully_shard
from lightning_distrec.errors import ConfigError

INDIVISIBLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""They use the weights of their submodules without calling those."""

ActivationCheckpointing = bool | list[str]
OPTION = "activation_checkpointing"


def named_layers(module: nn.Module, names: Sequence[str], option: str) -> dict[str, nn.Module]:
    """Return path -> submodule of those whose path or class is named.

    Raises ConfigError: there is none of a name, or it has no forward.
    """
    submodules = {path: submodule for path, submodule in module.named_modules() if path}
    classes = set(map(class_name, submodules.values()))
    for name in names:
        if name not in submodules and name not in classes:
            near = get_close_matches(name, [*classes, *submodules], n=3)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise ConfigError(
                f"{option}: the module has no '{name}', neither as a class nor as a path.{hint}"
            )
    layers = {
        path: layer
        for path, layer in submodules.items()
        if path in names or class_name(layer) in names
    }
    for path, layer in layers.items():
        if not can_be_called(layer):
            raise ConfigError(
                f"{option}: '{path}' is a {class_name(layer)}, which is never called itself. Name "
                "the class of its submodules."
            )
    return layers


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class; fully_shard puts "FSDP" in front of it."""
    return class_before_fully_shard(module).__name__


def repeated_layers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield path and submodule of layers that stand side by side in several copies and have parts
    themselves."""
    siblings = Counter(map(signature, module.children()))
    for name, child in module.named_children():
        has_parts = isinstance(child, INDIVISIBLE) or any(True for _ in child.children())
        if has_parts and can_be_called(child) and siblings[signature(child)] > 1:
            yield f"{prefix}{name}", child
        else:
            yield from repeated_layers(child, f"{prefix}{name}.")


def checkpointed_layers(
    module: nn.Module, option: ActivationCheckpointing, blocks: Mapping[str, nn.Module] | None
) -> dict[str, nn.Module]:
    """Return path -> layer of those that may be checkpointed.

    blocks: those of FSDP2, which `true` means; None: layers that repeat. Raises ConfigError: there
    are none, or a named one cannot be checkpointed.
    """
    if not option:
        return {}
    if isinstance(option, list):
        layers = named_layers(module, option, OPTION)
    elif option is True and blocks is not None:
        return dict(blocks)
    else:
        layers = dict(repeated_layers(module))
        if not layers:
            raise ConfigError(
                f"{OPTION}={option!r}: the module has no layers of parts that repeat, like a "
                f"transformer's. Name the layers, {OPTION}=[...]."
            )
    for path in layers:
        inner = _first_inside(path, layers)
        if inner:
            raise ConfigError(
                f"{OPTION}: '{inner}' is inside of '{path}', which recomputes it already. Name one."
            )
        inner = _first_inside(path, blocks or ())
        if inner:
            raise ConfigError(
                f"{OPTION}: '{path}' contains '{inner}', a block that FSDP2 gathers by itself. "
                f"Name that one, or let wrap name '{path}'."
            )
    return layers


def _first_inside(path: str, paths: Iterable[str]) -> str:
    for inner in paths:
        if inner.startswith(f"{path}."):
            return inner
    return ""


def signature(module: nn.Module) -> tuple[Any, ...]:
    """Return what is equal for layers of one kind: the class, and the shapes of parameters."""
    return type(module), *(tuple(parameter.shape) for parameter in module.parameters())


def can_be_called(module: nn.Module) -> bool:
    """Return whether a module has a forward."""
    return type(module).forward is not nn.Module.forward


BufferKey = tuple[nn.Module, str]
"""The module that has a buffer, and the buffer's name in it."""
SMALL_BYTES = 2**20
"""Buffers up to this size are kept for backward; larger ones only if they change."""


def checkpoint_activations(blocks: Iterable[nn.Module]) -> None:
    """Let blocks recompute their activations in backward. Source: torch.utils.checkpoint."""
    for block in blocks:
        if not is_checkpointed(block):  # a copy that was made in an earlier run is
            # An attribute of the instance hides the class's forward. A wrapper module would do the
            # same, but it would change the paths of the block's parameters, which checkpoints and
            # optimizers go by.
            recomputed: Any = partial(
                checkpoint, block.forward, use_reentrant=False, context_fn=partial(_contexts, block)
            )
            block.forward = recomputed


def is_checkpointed(block: nn.Module) -> bool:
    """Return whether a block recomputes its activations."""
    forward = vars(block).get("forward")
    return isinstance(forward, partial) and forward.func is checkpoint


def _buffers_of(block: nn.Module) -> dict[BufferKey, Tensor]:
    buffers = {}
    for part in block.modules():
        for name, buffer in part.named_buffers(recurse=False):
            buffers[(part, name)] = buffer
    return buffers


def _contexts(
    block: nn.Module,
) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a block's first forward and of its recomputation."""
    recorded: dict[BufferKey, Tensor] = {}
    return _record_buffers(block, recorded), _restore_buffers(recorded)


@contextmanager
def _record_buffers(block: nn.Module, recorded: dict[BufferKey, Tensor]) -> Iterator[None]:
    """Record the values before forward of buffers that it may write to, such as running means and
    spectral norms."""
    # Versions do not show all of that: batch norm's kernel and writes by `.data` leave them. So
    # small buffers are kept whether they are written to or not, since looking waits for a GPU; of
    # large ones those are forgotten that have not changed, as masks and tables of positions, for
    # which the host waits once for all of a block.
    buffers = _buffers_of(block)
    values = {id(buffer): buffer.clone() for buffer in buffers.values()}
    versions = {id(buffer): version_of(buffer) for buffer in buffers.values()}
    try:
        yield
    finally:
        unclear = [
            key
            for key, buffer in buffers.items()
            if buffer.nbytes > SMALL_BYTES
            and getattr(*key) is buffer
            and version_of(buffer) == versions[id(buffer)]
            and buffer.shape == values[id(buffer)].shape
        ]
        comparisons = [(buffers[key] == values[id(buffers[key])]).all() for key in unclear]
        are_equal = torch.stack(comparisons).tolist() if comparisons else []
        unchanged = {key for key, is_equal in zip(unclear, are_equal, strict=True) if is_equal}
        recorded |= {
            key: values[id(buffer)] for key, buffer in buffers.items() if key not in unchanged
        }


@contextmanager
def _restore_buffers(recorded: dict[BufferKey, Tensor]) -> Iterator[None]:
    """Let the recomputation start from the recorded values and write to copies, so that each batch
    counts once."""
    current = {key: getattr(*key) for key in recorded}
    # a buffer with two names stays one
    copies = {id(value): value.clone() for value in recorded.values()}
    for (submodule, name), value in recorded.items():
        setattr(submodule, name, copies[id(value)])
    try:
        yield
    finally:
        for (submodule, name), buffer in current.items():
            setattr(submodule, name, buffer)


class CheckpointedLayers:
    """The layers of a module that recompute their activations, from a run's `setup` to its end.

    blocks: path -> block of FSDP2; None: no FSDP2.
    """

    def __init__(
        self,
        module: nn.Module,
        option: ActivationCheckpointing,
        blocks: Mapping[str, nn.Module] | None = None,
    ) -> None:
        self._layers = checkpointed_layers(module, option, blocks)
        self._forwards = {path: vars(layer).get("forward") for path, layer in self._layers.items()}
        checkpoint_activations(self._layers.values())

    def undo(self) -> None:
        """Let the layers compute as they did before."""
        for path, layer in self._layers.items():
            vars(layer).pop("forward", None)
            forward = self._forwards[path]
            if forward is not None:
                layer.forward = forward
