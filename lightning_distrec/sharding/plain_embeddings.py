"""Converts nn.Embedding and nn.EmbeddingBag to tables: which of them, and to which collection."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torchrec.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from lightning_distrec._compat.torch import have_gradient_hooks
from lightning_distrec.errors import ConfigError, ShardingError, did_you_mean
from lightning_distrec.option_values import plain_fields
from lightning_distrec.sharding.calls import FEATURE
from lightning_distrec.sharding.proxies import ShardedProxy
from lightning_distrec.sharding.weights.shard_operations import words

Plain: TypeAlias = nn.Embedding | nn.EmbeddingBag
Convert = Literal["auto", "all", "none"]
HARMLESS = words("""
    __init__ reset_parameters _fill_padding_idx_with_zero extra_repr __repr__ __module__ __doc__
    __dict__ __weakref__ __annotations__ __firstlineno__ __static_attributes__
""")
"""What a subclass may have of its own and still be looked up as nn.Embedding is."""
WATCH = "Register them on what is looked up. For wandb's watch, set log='parameters'"
"""What to do about hooks on the gradient of a table."""
POOLINGS = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}


@dataclass(frozen=True)
class Conversion:
    """Which plain embeddings become sharded tables.

    selected: "auto" takes those of at least `min_rows` rows that can be taken exactly, "all" those
    of any size, "none" none; a list of paths takes those and raises where one cannot be taken.
    """

    selected: Convert | list[str] = "auto"
    min_rows: int = 100_000

    def __post_init__(self) -> None:
        plain_fields(self)
        if self.min_rows < 1:
            raise ConfigError(f"min_rows={self.min_rows}: must be above 0.")


NO_CONVERSION = Conversion("none")


class PlainEmbeddings:
    """Decides which plain embeddings below `root` become tables."""

    def __init__(self, root: nn.Module, conversion: Conversion) -> None:
        self._conversion = conversion
        self._names: dict[int, set[str]] = {}
        for name, parameter in root.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), set()).add(name)
        self._paths: dict[int, set[str]] = {}
        for path, child in root.named_modules(remove_duplicate=False):
            if isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
                self._paths.setdefault(id(child), set()).add(path)

    def take(
        self, path: str, plain: Plain
    ) -> EmbeddingBagCollection | EmbeddingCollection | str | None:
        """Return a collection around the embedding's own weight, or why it stays unsharded; None:
        not requested."""
        selected = self._conversion.selected
        # A proxy inherits from nn.Embedding, and is sharded already.
        if isinstance(plain, ShardedProxy) or selected == "none":
            return None
        named = not isinstance(selected, str)
        if named and not self._paths[id(plain)] & set(selected):
            return None
        if selected == "auto" and plain.num_embeddings < self._conversion.min_rows:
            return None
        reason = self._obstacle(plain)
        if reason and named:
            raise ShardingError(f"convert_embeddings: '{path}' cannot be sharded: {reason}.")
        return reason or _collection(path, plain)

    def check_names(self) -> None:
        """Raise ConfigError where a path was given at which there is no embedding."""
        if isinstance(self._conversion.selected, str):
            return
        paths = set().union(*self._paths.values()) if self._paths else set()
        for name in self._conversion.selected:
            if name not in paths:
                raise ConfigError(
                    "convert_embeddings: there is no nn.Embedding or nn.EmbeddingBag "
                    f"'{name}'{did_you_mean(name, paths)} The module has "
                    f"{', '.join(sorted(paths)) or 'none'}."
                )

    def _obstacle(self, plain: Plain) -> str:
        reason = obstacle_of(plain)
        if reason:
            return reason
        # A tied weight, of an output layer for example, would stay full there, while lookups use
        # shards.
        own_names = {f"{path}.weight" for path in self._paths[id(plain)]}
        other_names = self._names[id(plain.weight)] - own_names
        return f"its weight is also '{min(other_names)}'" if other_names else ""


def obstacle_of(plain: Plain) -> str:
    """Return why an embedding cannot be a table, as far as it shows by itself; "" where it can."""
    changed = overridden_name(type(plain))
    if changed:
        return (
            f"{type(plain).__name__} is a subclass and may compute something else: it has its own "
            f"{changed}"
        )
    if not isinstance(plain.weight, nn.Parameter):
        return "its weight is computed, not a parameter (a parametrization)"
    if have_gradient_hooks([plain.weight]):
        return (
            f"its weight has gradient hooks, which would see a part of the gradient only. {WATCH}"
        )
    for name, _ in [*plain.named_parameters(), *plain.named_buffers()]:
        if name != "weight":
            return f"it has a '{name}' besides its weight"
    if plain.max_norm is not None:
        return (
            f"max_norm={plain.max_norm} changes rows when they are looked up, on each rank by "
            "itself"
        )
    if plain.scale_grad_by_freq:
        return "scale_grad_by_freq counts ids within one device's batch"
    if isinstance(plain, nn.EmbeddingBag) and plain.mode not in POOLINGS:
        return f"mode={plain.mode!r} has no FBGEMM kernel"
    if plain.embedding_dim % 4:
        return (
            f"embedding_dim={plain.embedding_dim}, but FBGEMM's rows come in multiples of 4 columns"
        )
    if plain.weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"its weight is {plain.weight.dtype}"
    return ""


def overridden_name(kind: type[Plain]) -> str:
    """Return the first name by which a subclass may compute something else than its lookup does, or
    ""."""
    base: type[nn.Module] = nn.Embedding if issubclass(kind, nn.Embedding) else nn.EmbeddingBag
    # By all classes down to torch's own: a base class of the user's may compute something else,
    # too.
    for subclass in kind.__mro__[: kind.__mro__.index(base)]:
        for name in vars(subclass):
            if hasattr(base, name) and name not in HARMLESS:
                return name
    return ""


def _table_name(path: str) -> str:
    """Return a name that torchrec may call a module and a parameter by: without dots, and no
    attribute of theirs."""
    name = path.replace(".", "/")
    # ModuleDict refuses keys that are attributes of its own, such as 'keys' or 'type'.
    is_attribute = any(hasattr(kind, name) for kind in (nn.ModuleDict(), nn.ParameterDict()))
    return f"{name}/rows" if is_attribute else name


def _collection(path: str, plain: Plain) -> EmbeddingBagCollection | EmbeddingCollection:
    name = _table_name(path)
    options: dict[str, Any] = {
        "name": name,
        "num_embeddings": plain.num_embeddings,
        "embedding_dim": plain.embedding_dim,
        "feature_names": [FEATURE],
        # FBGEMM does not train bfloat16 rows everywhere; a bfloat16 table becomes a float32 one.
        "data_type": DataType.FP16 if plain.weight.dtype == torch.float16 else DataType.FP32,
        # As nn.Embedding draws its rows; for rows that get another id, and tables on meta.
        "init_fn": torch.nn.init.normal_,
    }
    # On meta, so that no second table is made. The user's own Parameter object takes the place of
    # its weight.
    meta = torch.device("meta")
    if isinstance(plain, nn.EmbeddingBag):
        bags = EmbeddingBagCollection(
            [EmbeddingBagConfig(**options, pooling=POOLINGS[plain.mode])], device=meta
        )
        bags.embedding_bags[name].weight = plain.weight
        return bags
    rows = EmbeddingCollection([EmbeddingConfig(**options)], device=meta)
    rows.embeddings[name].weight = plain.weight
    return rows
