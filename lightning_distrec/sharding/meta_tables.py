"""Builds tables on the meta device: they have a size, and no rows yet."""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from lightning_distrec.sharding.tables import odd_dim


@contextlib.contextmanager
def tables_on_meta() -> Iterator[None]:
    """Make collections that are constructed inside of the context without a `device` of their own on meta.

    Everything else keeps its device, so that dense layers are initialised as usual. The rows are made shard by shard
    once a plan assigns them to ranks (initial_weights.py).
    """
    # The two constructors are replaced for the time of the context: a `with torch.device("meta")` around the user's
    # code would put every other layer on meta too.
    originals = {kind: kind.__init__ for kind in (EmbeddingBagCollection, EmbeddingCollection)}
    for kind, original in originals.items():
        kind.__init__ = _with_meta_default(original)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for kind, original in originals.items():
            kind.__init__ = original  # type: ignore[method-assign]


def _with_meta_default(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        # A subclass is left alone by the strategy, and so are odd dims; they need their rows now.
        exact = type(args[0]) in (EmbeddingBagCollection, EmbeddingCollection)
        if exact and not odd_dim(given.arguments["tables"]) and given.arguments.get("device") is None:
            given.arguments["device"] = torch.device("meta")
        original(*given.args, **given.kwargs)

    return init
