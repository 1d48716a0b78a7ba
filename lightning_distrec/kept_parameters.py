"""Where modules keep their parameters a second time: in plain dicts, lists and attributes, which
torch does not see."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_distrec.errors import UnsupportedError

CONTAINERS = (dict, list, tuple, set, frozenset)
REGISTERED = ("_parameters", "_modules", "_trainer")
"""Attributes of modules that are not searched: torch sees what is in them, and the Trainer is no
part of a module."""


class KeptParameter:
    """An entry of a container that is a parameter."""

    def __init__(self, module: nn.Module, place: str, container: Any, key: Any) -> None:
        self.module = module
        self._place = place
        self._container = container
        self._key = key

    @property
    def parameter(self) -> Any:
        """What the entry holds."""
        return self._container[self._key]

    @parameter.setter
    def parameter(self, parameter: Any) -> None:
        self._container[self._key] = parameter

    def refuse_fixed(self) -> None:
        """Raise UnsupportedError: the entry cannot hold another parameter."""
        if not isinstance(self._container, (dict, list)):
            raise UnsupportedError(
                f"{self._place} keeps a parameter in a tuple or a set. Parameters are replaced "
                "when they are sharded, and it would keep the old one, which does not learn. Use a "
                "list or a dict."
            )


def kept_parameters(module: nn.Module) -> Iterator[KeptParameter]:
    """Yield the entries of plain attributes, dicts, lists and tuples of a module that hold
    parameters."""
    for path, submodule in module.named_modules():
        registered = {id(vars(submodule).get(name)) for name in REGISTERED}
        yield from _entries(submodule, path or "self", vars(submodule), registered)


def _entries(
    module: nn.Module, place: str, container: Any, visited: set[int]
) -> Iterator[KeptParameter]:
    visited.add(id(container))
    for key, value in list(
        container.items() if isinstance(container, dict) else enumerate(container)
    ):
        if isinstance(value, nn.Parameter):
            yield KeptParameter(module, f"{place}[{key!r}]", container, key)
        # Tuples of numbers and texts are not tracked: millions of them take no time.
        elif isinstance(value, CONTAINERS) and gc.is_tracked(value) and id(value) not in visited:
            yield from _entries(module, f"{place}[{key!r}]", value, visited)


@contextmanager
def kept_up(module: nn.Module) -> Iterator[None]:
    """Around what replaces parameters of a module: entries that hold one of them get the one that
    takes its place."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    kept = {
        entry: names[entry.parameter]
        for entry in kept_parameters(module)
        if entry.parameter in names
    }
    del names  # tables are freed one by one as they are sharded
    yield
    current = dict(module.named_parameters(remove_duplicate=False))
    for entry, name in kept.items():
        # This rank may have no shard of it, and then nothing can be computed with it.
        entry.parameter = current.get(name, nn.Parameter(entry.parameter.to("meta")))
