"""Activation checkpointing: blocks save no activations for backward, which runs their forward again."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_distrec._compat.torch import version_of

BufferKey = tuple[nn.Module, str]
"""The module that has a buffer, and the buffer's name in it."""
SMALL_BYTES = 2**20
"""Buffers up to this size are kept for backward; larger ones only if they change."""


def checkpoint_activations(blocks: Iterable[nn.Module]) -> None:
    """Let blocks recompute their activations in backward. Source: torch.utils.checkpoint."""
    for block in blocks:
        if not is_checkpointed(block):  # a copy that was made in an earlier run is
            # An attribute of the instance hides the class's forward. A wrapper module would do the same, but it would
            # change the paths of the block's parameters, which checkpoints and optimizers go by.
            recomputed: Any = partial(
                checkpoint, block.forward, use_reentrant=False, context_fn=partial(_contexts, block)
            )
            block.forward = recomputed


def is_checkpointed(block: nn.Module) -> bool:
    """Return whether a block recomputes its activations."""
    forward = vars(block).get("forward")
    return isinstance(forward, partial) and forward.func is checkpoint


@contextmanager
def buffers_as_before(block: nn.Module) -> Iterator[None]:
    """Inside of the context a block's forward writes to copies of its buffers, which are dropped."""
    keys = [(submodule, name) for submodule in block.modules() for name, _ in submodule.named_buffers(recurse=False)]
    with _restore_buffers({key: getattr(*key) for key in keys}):
        yield


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a block's first forward and of its recomputation."""
    before: dict[BufferKey, Tensor] = {}
    return _record_buffers(block, before), _restore_buffers(before)


@contextmanager
def _record_buffers(block: nn.Module, before: dict[BufferKey, Tensor]) -> Iterator[None]:
    """Record the values before forward of the buffers that it may write to, such as running means and spectral norms.

    Versions do not show all of that: batch norm's kernel and writes by `.data` leave them. So small buffers are kept
    whether they are written to or not, since looking waits for a GPU; of large ones those are forgotten that have not
    changed, as masks and tables of positions, for which the host waits once for all of a block.
    """
    keys = [(submodule, name) for submodule in block.modules() for name, _ in submodule.named_buffers(recurse=False)]
    buffers = {key: getattr(*key) for key in keys}
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
        same = [(buffers[key] == values[id(buffers[key])]).all() for key in unclear]
        are_same = torch.stack(same).tolist() if same else []
        unchanged = {key for key, is_same in zip(unclear, are_same, strict=True) if is_same}
        before |= {key: values[id(buffer)] for key, buffer in buffers.items() if key not in unchanged}


@contextmanager
def _restore_buffers(before: dict[BufferKey, Tensor]) -> Iterator[None]:
    """Let the recomputation start from the recorded values and write to copies, so that each batch counts once."""
    current = {key: getattr(*key) for key in before}
    copies = {id(value): value.clone() for value in before.values()}  # a buffer with two names stays one
    for (submodule, name), value in before.items():
        setattr(submodule, name, copies[id(value)])
    try:
        yield
    finally:
        for (submodule, name), buffer in current.items():
            setattr(submodule, name, buffer)
