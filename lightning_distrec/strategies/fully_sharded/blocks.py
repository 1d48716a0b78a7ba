"""Which parts of a module are gathered and freed as one, while it is fully sharded."""

from collections import Counter
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any, Literal

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_distrec.errors import ConfigError

Wrap = Literal["auto"] | Sequence[str]
WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""They use the weights of layers inside of them without calling those."""


def choose_blocks(module: nn.Module, wrap: Wrap, min_num_parameters: int) -> list[nn.Module]:
    """Return the blocks of a module, those inside of others first; the rest of it is gathered for the whole of a step.

    wrap: "auto": of at least min_num_parameters, what stands beside another of its kind and shapes, as the layers of a
    transformer do, and single layers; or names of classes, and paths in the module.
    Raises ConfigError: there is no such class or path, or it shares a weight with what is outside of it.
    """
    owners = _owners(module)
    if wrap == "auto":
        return list(_found(module, min_num_parameters, owners))
    paths = {path: part for path, part in module.named_modules() if path}
    classes = {type(part).__name__ for part in paths.values()}
    for name in wrap:
        if name not in paths and name not in classes:
            near = get_close_matches(name, [*classes, *paths], n=3)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise ConfigError(f"wrap: the module has no '{name}', neither as a class nor as a path.{hint}")
    chosen = {path: part for path, part in paths.items() if path in wrap or type(part).__name__ in wrap}
    for path, part in chosen.items():
        if not _can_be_called(part):
            raise ConfigError(
                f"wrap: '{path}' is a {type(part).__name__}, which is never called itself. Name the class of its parts."
            )
        if not _is_closed(part, owners):
            raise ConfigError(
                f"wrap: '{path}' shares a weight with another part of the module, so that it cannot be gathered and "
                "freed alone. Leave it out, or name a part that holds both."
            )
    return [part for _, part in sorted(chosen.items(), key=lambda item: -item[0].count("."))]


def _found(module: nn.Module, least: int, owners: dict[int, set[int]]) -> Iterator[nn.Module]:
    kinds = Counter(_kind(child) for child in module.children())
    for child in dict.fromkeys(module.children()):
        if isinstance(child, FSDPModule) or sum(p.numel() for p in child.parameters()) < least:
            continue
        is_layer = isinstance(child, WHOLE) or not any(True for _ in child.children())
        if (is_layer or kinds[_kind(child)] > 1) and _can_be_called(child) and _is_closed(child, owners):
            yield child
        elif not isinstance(child, WHOLE):
            yield from _found(child, least, owners)


def _kind(module: nn.Module) -> tuple[Any, ...]:
    return type(module), *(tuple(parameter.shape) for parameter in module.parameters())


def _can_be_called(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _owners(module: nn.Module) -> dict[int, set[int]]:
    """Return parameter's id -> ids of the modules that have it themselves."""
    owners: dict[int, set[int]] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(part))
    return owners


def _is_closed(module: nn.Module, owners: dict[int, set[int]]) -> bool:
    """Whether nothing outside of a module has its parameters too."""
    inside = {id(part) for part in module.modules()}
    return all(owners[id(parameter)] <= inside for parameter in module.parameters())
