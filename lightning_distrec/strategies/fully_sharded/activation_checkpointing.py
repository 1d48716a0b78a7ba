"""Activation checkpointing: blocks save no activations for backward, which runs their forward again."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BufferKey = tuple[nn.Module, str]
"""The module that has a buffer, and the buffer's name in it."""


def checkpoint_activations(blocks: Iterable[nn.Module]) -> None:
    """Let blocks recompute their activations in backward. Source: torch.utils.checkpoint."""
    for block in blocks:
        if "forward" not in vars(block):  # an earlier run may have replaced it
            # An attribute of the instance hides the class's forward. A wrapper module would do the same, but it would
            # change the paths of the block's parameters, which checkpoints and optimizers go by.
            recomputed: Any = partial(
                checkpoint, block.forward, use_reentrant=False, context_fn=partial(_contexts, block)
            )
            block.forward = recomputed


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a block's first forward and of its recomputation."""
    written: dict[BufferKey, Tensor] = {}
    return _record_written_buffers(block, written), _restore_buffers(written)


@contextmanager
def _record_written_buffers(block: nn.Module, written: dict[BufferKey, Tensor]) -> Iterator[None]:
    """Record the values before forward of the buffers that it writes to, such as running means and spectral norms."""
    keys = [(submodule, name) for submodule in block.modules() for name, _ in submodule.named_buffers(recurse=False)]
    before = {key: getattr(*key) for key in keys}
    values = {key: buffer.clone() for key, buffer in before.items()}
    try:
        yield
    finally:
        written |= {key: values[key] for key in keys if not _is_unchanged(getattr(*key), before[key], values[key])}


def _is_unchanged(buffer: Tensor, before: Tensor, value: Tensor) -> bool:
    return buffer is before and buffer.shape == value.shape and bool((buffer == value).all())


@contextmanager
def _restore_buffers(written: dict[BufferKey, Tensor]) -> Iterator[None]:
    """Let the recomputation start from the recorded values and write to copies, so that each batch counts once."""
    current = {key: getattr(*key) for key in written}
    for (submodule, name), value in written.items():
        setattr(submodule, name, value.clone())
    try:
        yield
    finally:
        for (submodule, name), buffer in current.items():
            setattr(submodule, name, buffer)
