"""Blocks that keep no activations for backward, which runs their forward once more instead."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Place = tuple[nn.Module, str]


def recompute(blocks: Iterable[nn.Module]) -> None:
    """Let blocks compute their activations again in backward. Source: torch.utils.checkpoint."""
    for block in blocks:
        if "forward" not in vars(block):
            again: Any = partial(
                checkpoint, block.forward, use_reentrant=False, context_fn=partial(_first_and_again, block)
            )
            block.forward = again


def _first_and_again(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    before: dict[Place, Tensor] = {}
    return _noted(block, before), _with_buffers(before)


@contextmanager
def _noted(block: nn.Module, before: dict[Place, Tensor]) -> Iterator[None]:
    """Keep what the buffers that forward writes to were before it: running means, spectral norms."""
    places = [(part, name) for part in block.modules() for name, _ in part.named_buffers(recurse=False)]
    now = {place: getattr(*place) for place in places}
    kept = {place: buffer.clone() for place, buffer in now.items()}
    try:
        yield
    finally:
        before |= {place: kept[place] for place in places if not _same(getattr(*place), now[place], kept[place])}


def _same(buffer: Tensor, then: Tensor, kept: Tensor) -> bool:
    return buffer is then and buffer.shape == kept.shape and bool((buffer == kept).all())


@contextmanager
def _with_buffers(before: dict[Place, Tensor]) -> Iterator[None]:
    """Let forward find them as they were, and write to copies: each batch counts once."""
    now = {place: getattr(*place) for place in before}
    for (part, name), buffer in before.items():
        setattr(part, name, buffer.clone())
    try:
        yield
    finally:
        for (part, name), buffer in now.items():
            setattr(part, name, buffer)
