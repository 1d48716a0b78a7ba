"""Makes tables without rows in a constructor: each rank makes its own rows once a plan assigns them."""

import functools
import inspect
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from lightning_distrec.sharding.meta_weight import record_writes
from lightning_distrec.sharding.plain_embeddings import POOLINGS, Conversion, Convert, overridden_name
from lightning_distrec.sharding.tables import odd_dim

COLLECTIONS = (EmbeddingBagCollection, EmbeddingCollection)
PLAIN = (nn.Embedding, nn.EmbeddingBag)
META = torch.device("meta")


def meta_tables(
    convert_embeddings: Convert | list[str] = "auto", min_rows: int = 100_000
) -> AbstractContextManager[None]:
    """Make the tables that are constructed inside of the context without rows, as those of `configure_model`.

    convert_embeddings, min_rows: as for the strategy, which gives rows to those that it does not shard.
    """
    return tables_on_meta(Conversion(convert_embeddings, min_rows))


@contextmanager
def tables_on_meta(conversion: Conversion | None = None) -> Iterator[None]:
    """Make tables that are constructed inside of the context without a `device` of their own on meta.

    Everything else keeps its device, so that dense layers are initialised as usual. The rows are made shard by shard
    once a plan assigns them to ranks (initial_weights.py).
    conversion: which nn.Embedding and nn.EmbeddingBag are such tables. What is written to a table is recorded then.
    None: collections only, for what needs no rows.
    """
    # The constructors are replaced for the time of the context: a `with torch.device("meta")` around the user's
    # code would put every other layer on meta too.
    kinds = COLLECTIONS if conversion is None else (*COLLECTIONS, *PLAIN)
    originals: dict[Any, Any] = {kind: kind.__init__ for kind in kinds}
    for kind, original in originals.items():
        kind.__init__ = _plain(original, conversion) if kind in PLAIN else _collection(original, conversion)
    try:
        yield
    finally:
        for kind, original in originals.items():
            kind.__init__ = original


def _collection(original: Any, conversion: Conversion | None) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        # A subclass is left alone by the strategy, and so are odd dims; they need their rows now.
        if type(self) not in COLLECTIONS or odd_dim(bound.arguments["tables"]) or bound.arguments.get("device"):
            original(*bound.args, **bound.kwargs)
            return
        bound.arguments["device"] = META
        original(*bound.args, **bound.kwargs)
        for config in bound.arguments["tables"] if conversion is not None else ():
            children = self.embedding_bags if isinstance(self, EmbeddingBagCollection) else self.embeddings
            record_writes(children[config.name].weight, config.init_fn, f"table '{config.name}'")

    return init


def _plain(original: Any, conversion: Conversion | None) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        options = bound.arguments
        if not _will_be_sharded(type(self), options, conversion):
            original(*bound.args, **bound.kwargs)
            return
        shape = options["num_embeddings"], options["embedding_dim"]
        options["_weight"] = torch.empty(shape, dtype=options["dtype"], device=META)
        original(*bound.args, **bound.kwargs)
        name = f"{type(self).__name__}({shape[0]}, {shape[1]})"
        record = record_writes(self.weight, nn.init.normal_, name)
        record.in_constructor = True
        self.reset_parameters()
        record.in_constructor = False

    return init


def _will_be_sharded(kind: Any, options: dict[str, Any], conversion: Conversion | None) -> bool:
    """Return whether an embedding of these arguments is sharded, as far as they show; see PlainEmbeddings."""
    if conversion is None or conversion.selected == "none":
        return False
    if conversion.selected == "auto" and options["num_embeddings"] < conversion.min_rows:
        return False
    dtype = options["dtype"] or torch.get_default_dtype()
    return (
        options["_weight"] is None
        and options["device"] is None
        and options["max_norm"] is None
        and not options["scale_grad_by_freq"]
        and options.get("mode", "sum") in POOLINGS
        and not options["embedding_dim"] % 4
        and dtype in (torch.float32, torch.float16, torch.bfloat16)
        and not overridden_name(kind)
    )
