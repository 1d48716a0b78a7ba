"""Which layers are checkpointed: `activation_checkpointing` names them, or asks for those that repeat."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from torch import nn

from lightning_distrec._compat.torch_distributed import class_before_fully_shard
from lightning_distrec.errors import ConfigError
from lightning_distrec.units import parse_bytes

INDIVISIBLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""They use the weights of their submodules without calling those."""

ActivationCheckpointing = bool | str | list[str]
OPTION = "activation_checkpointing"


def check_option(option: Any) -> None:
    """Raise ConfigError: it is none of the values that `activation_checkpointing` takes."""
    if isinstance(option, str) and option != "auto":
        try:
            parse_bytes(option, OPTION)
        except ConfigError as error:
            raise ConfigError(
                f"{OPTION}={option!r}: must be true, false, 'auto', the memory that activations may take ('4GiB'), or "
                f"a list of class names and of paths: [{option!r}]."
            ) from error


def target_bytes(option: ActivationCheckpointing) -> int | None:
    """Return the memory that activations may take; None: as much as there is, for "auto"."""
    return parse_bytes(option, OPTION) if isinstance(option, str) and option != "auto" else None


def named_layers(module: nn.Module, names: Sequence[str], option: str) -> dict[str, nn.Module]:
    """Return path -> submodule of those whose path or class is named. Raises ConfigError: there is none of a name."""
    submodules = {path: submodule for path, submodule in module.named_modules() if path}
    classes = {class_name(submodule) for submodule in submodules.values()}
    for name in names:
        if name not in submodules and name not in classes:
            near = get_close_matches(name, [*classes, *submodules], n=3)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise ConfigError(f"{option}: the module has no '{name}', neither as a class nor as a path.{hint}")
    return {path: layer for path, layer in submodules.items() if path in names or class_name(layer) in names}


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class; fully_shard puts "FSDP" in front of it."""
    return class_before_fully_shard(module).__name__


def repeated_layers(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield path and submodule of layers that stand side by side in several copies and have parts themselves."""
    siblings = Counter(signature(child) for child in module.children())
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

    blocks: those of FSDP2, which `true` means; None: layers that repeat. Raises ConfigError: there are none, or a named
    one cannot be checkpointed.
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
                f"{OPTION}={option!r}: the module has no layers of parts that repeat, like a transformer's. Name the "
                f"layers, {OPTION}=[...]."
            )
    for path, layer in layers.items():
        if not can_be_called(layer):
            raise ConfigError(
                f"{OPTION}: '{path}' is a {class_name(layer)}, which is never called itself. Name the class of its "
                "submodules."
            )
        if inner := next((p for p in layers if p.startswith(f"{path}.")), None):
            raise ConfigError(f"{OPTION}: '{inner}' is inside of '{path}', which recomputes it already. Name one.")
        if inner := next((p for p in blocks or () if p.startswith(f"{path}.")), None):
            raise ConfigError(
                f"{OPTION}: '{path}' contains '{inner}', a block that FSDP2 gathers by itself. Name that one, or let "
                f"wrap name '{path}'."
            )
    return layers


def signature(module: nn.Module) -> tuple[Any, ...]:
    """Return what is equal for layers of one kind: the class, and the shapes of parameters."""
    return type(module), *(tuple(parameter.shape) for parameter in module.parameters())


def can_be_called(module: nn.Module) -> bool:
    """Return whether a module has a forward."""
    return type(module).forward is not nn.Module.forward
