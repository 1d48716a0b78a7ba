"""Blocks that keep no activations for backward, which runs their forward once more instead."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(blocks: Iterable[nn.Module]) -> None:
    """Let blocks compute their activations again in backward. Source: torch.utils.checkpoint."""
    for block in blocks:
        if "forward" not in vars(block):
            again: Any = partial(
                checkpoint, block.forward, use_reentrant=False, context_fn=partial(_first_and_again, block)
            )
            block.forward = again


def _first_and_again(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _buffers_kept(block)


@contextmanager
def _buffers_kept(block: nn.Module) -> Iterator[None]:
    """Let forward write to copies of the buffers: running means count each batch once."""
    kept = [(part, name, buffer) for part in block.modules() for name, buffer in part.named_buffers(recurse=False)]
    for part, name, buffer in kept:
        setattr(part, name, buffer.clone())
    try:
        yield
    finally:
        for part, name, buffer in kept:
            setattr(part, name, buffer)
