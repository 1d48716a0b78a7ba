"""Tensors that a module holds: its buffers and attributes may lead to ids, weights that learn may not."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_distrec.pipeline.computed.operations import HeldTensor

COPIED_BYTES = 64 * 2**20
"""A larger tensor is not copied, and counts as changed once it is written to."""


def held_by(module: nn.Module) -> Iterator[tuple[Tensor, HeldTensor]]:
    """Yield the tensors that can be read again by name: buffers, frozen parameters, attributes, lists and dicts."""
    for prefix, child in module.named_modules():
        name = f"self.{prefix}" if prefix else "self"
        held = [*child.named_buffers(recurse=False), *child.named_parameters(recurse=False), *vars(child).items()]
        for key, value in held:
            if isinstance(value, Tensor):
                if not value.requires_grad:
                    yield value, HeldTensor(f"{name}.{key}", partial(_entry, child, key))
            elif type(value) in (list, tuple, dict) and not key.startswith("_"):
                for at, entry in value.items() if isinstance(value, dict) else enumerate(value):
                    if isinstance(entry, Tensor) and not entry.requires_grad:
                        yield entry, HeldTensor(f"{name}.{key}[{at!r}]", partial(_entry, child, key, at))


def weights_of(module: nn.Module) -> Iterator[tuple[Tensor, str]]:
    """Yield the parameters that learn, with their names."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield parameter, name


def _entry(holder: nn.Module, name: str, *at: Any) -> Any:
    found = getattr(holder, name)
    return found[at[0]] if at else found


class HeldValue:
    """A held tensor as it was in a recorded step."""

    def __init__(self, held: HeldTensor) -> None:
        self.held = held
        self.tensor: Tensor = held.read()
        self._stamp = held.stamp()
        is_small = self.tensor.numel() * self.tensor.element_size() <= COPIED_BYTES
        self._copy = self.tensor.detach().clone() if is_small else None

    def changed(self) -> str:
        """Return "self.offsets changes" where it has another value now, or ""."""
        now = self.held.stamp()
        if now == self._stamp:
            return ""
        tensor = self.held.read()
        # A broadcast of buffers writes to them and changes nothing.
        if self._copy is None or not isinstance(tensor, Tensor) or not _are_equal(tensor, self._copy):
            return f"{self.held.name} changes"
        self._stamp = now
        return ""


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
