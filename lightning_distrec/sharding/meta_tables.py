"""Makes tables without rows in a constructor: each rank makes its own rows once a plan assigns
them."""

import functools
import inspect
from collections.abc import Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from lightning_distrec._compat.torchrec_modules import note_device
from lightning_distrec.errors import ShardingError
from lightning_distrec.host_memory import free_bytes
from lightning_distrec.sharding.meta_weight import can_have_rows, give_rows, record_writes
from lightning_distrec.sharding.plain_embeddings import Conversion, Convert, obstacle_of
from lightning_distrec.sharding.tables import odd_dim
from lightning_distrec.units import format_bytes

COLLECTIONS = (EmbeddingBagCollection, EmbeddingCollection)
PLAIN = (nn.Embedding, nn.EmbeddingBag)
META = torch.device("meta")


def meta_tables(
    convert_embeddings: Convert | list[str] = "auto", min_rows: int = 100_000
) -> AbstractContextManager[None]:
    """Make the tables that are constructed inside of the context without rows, as those of
    `configure_model`.

    convert_embeddings, min_rows: as for the strategy, which gives rows to those that it does not
    shard.
    """
    return tables_on_meta(Conversion(convert_embeddings, min_rows))


@contextmanager
def tables_on_meta(conversion: Conversion | None = None) -> Iterator[None]:
    """Make tables that are constructed inside of the context without a `device` of their own on
    meta.

    Everything else keeps its device, so that dense layers are initialised as usual. The rows are
    made shard by shard once a plan assigns them to ranks (initial_weights.py).
    conversion: which nn.Embedding and nn.EmbeddingBag are such tables. What is written to a table
    is recorded then.
    None: collections only, for what needs no rows.
    """
    # The constructors are replaced for the time of the context: a `with torch.device("meta")`
    # around the user's code would put every other layer on meta too.
    replaced: dict[Any, Any] = {}
    for collection in COLLECTIONS:
        replaced[collection] = _collection(collection.__init__, conversion)
    if conversion is not None:
        for plain in PLAIN:
            replaced[plain] = _plain(plain.__init__, conversion)
    originals: dict[Any, Any] = {kind: kind.__init__ for kind in replaced}
    for kind, init in replaced.items():
        kind.__init__ = init
    try:
        yield
    finally:
        for kind, original in originals.items():
            kind.__init__ = original


def give_rows_to_unsharded(root: nn.Module, sharded: Set[int]) -> None:
    """Give all of its rows to each weight below `root` that has none yet. sharded: ids of those
    that need none."""
    for parameter in root.parameters():
        if id(parameter) not in sharded and can_have_rows(parameter):
            give_rows(parameter)
    for child in root.modules():
        if type(child) in COLLECTIONS and child.device.type == "meta":
            note_device(child)


def _collection(original: Any, conversion: Conversion | None) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        # A subclass is left alone by the strategy, and so are odd dims; they need their rows now.
        device = bound.arguments.get("device")
        configs = bound.arguments["tables"]
        reason = odd_dim(configs) or ("it is given a device" if device else "")
        if type(self) not in COLLECTIONS:
            reason = f"{type(self).__name__} is a subclass"
        if not reason:
            bound.arguments["device"] = META
        elif conversion is not None:
            sizes = [(config.num_embeddings, config.embedding_dim) for config in configs]
            _check_memory(f"tables '{configs[0].name}' ...", sizes, 4, reason, device)
        original(*bound.args, **bound.kwargs)
        if reason or conversion is None:
            return
        is_pooled = isinstance(self, EmbeddingBagCollection)
        children = self.embedding_bags if is_pooled else self.embeddings
        for config in bound.arguments["tables"]:
            record_writes(children[config.name].weight, config.init_fn, f"table '{config.name}'")

    return init


def _plain(original: Any, conversion: Conversion) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        options = bound.arguments
        shape = options["num_embeddings"], options["embedding_dim"]
        reason = _full_obstacle(options, conversion)
        if not reason:
            options["_weight"] = torch.empty(shape, dtype=options["dtype"], device=META)
            original(*bound.args, **bound.kwargs)
            reason = obstacle_of(self)
            if not reason:
                name = f"{type(self).__name__}({shape[0]}, {shape[1]})"
                record_writes(self.weight, nn.init.normal_, name)
                self.reset_parameters()
                return
            options["_weight"] = None
        if options["_weight"] is None:
            dtype = options["dtype"] or torch.get_default_dtype()
            kind = type(self).__name__
            _check_memory(kind, [shape], dtype.itemsize, reason, options["device"])
        original(*bound.args, **bound.kwargs)

    return init


def _full_obstacle(options: dict[str, Any], conversion: Conversion) -> str:
    """Return why an embedding of these arguments is no table; "" where its kind may be."""
    if conversion.selected == "none":
        return "convert_embeddings is 'none'"
    if conversion.selected == "auto" and options["num_embeddings"] < conversion.min_rows:
        return "it has fewer rows than min_rows"
    if options["device"] is not None:
        return "it is given a device"
    return "it is given rows" if options["_weight"] is not None else ""


def _check_memory(
    description: str, sizes: list[tuple[int, int]], itemsize: int, reason: str, device: Any
) -> None:
    """Raise ShardingError: the host has no memory for tables of (rows, columns) that every rank
    builds whole."""
    needed = sum(rows * columns for rows, columns in sizes) * itemsize
    free = free_bytes()
    if needed > free and torch.device(device or torch.get_default_device()).type == "cpu":
        shapes = ", ".join(f"{rows:,} x {columns}" for rows, columns in sizes)
        raise ShardingError(
            f"{description} ({shapes}) needs {format_bytes(needed)} on every rank, and "
            f"{format_bytes(free)} are free. It is built whole because {reason}. Change that, so "
            "that each rank makes its own rows, or use fewer rows."
        )
