"""torchrec's sharding types, kernels and sharders, the types of exchanged rows, and TorchRec's
objects as options.

An object of TorchRec in the place of our options is taken where both say the same, and refused by
name where not.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal, NoReturn

from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs_registry,
)
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.types import CacheParams, ModuleSharder, ParameterSharding

from lightning_distrec.errors import ConfigError
from lightning_distrec.option_values import plain_fields
from lightning_distrec.sharding.tables import Table

POOLED_TYPES: tuple[str, ...] = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "data_parallel",
)
"""Those of an EmbeddingBagCollection's tables."""
SEQUENCE_TYPES: tuple[str, ...] = ("table_wise", "row_wise", "column_wise")
"""Those of an EmbeddingCollection's tables."""
SHARDING_TYPES = POOLED_TYPES
"""All that can be asked for."""

EVERY_RANK_TYPES = ("row_wise", "data_parallel")
"""Types that give one shard to every rank, in order."""
ONE_NODE_TYPES = ("table_row_wise", "table_column_wise")
"""Types that give all shards of a table to one node."""
TWO_LEVEL_TYPES = (*ONE_NODE_TYPES, "grid_shard")
"""Types that give a table to some nodes, and shard it among the ranks there."""
ROW_TYPES = ("row_wise", "table_row_wise", "grid_shard")
"""Types that shard rows."""
COLUMN_TYPES = ("column_wise", "table_column_wise", "grid_shard")
"""Types that shard columns."""

KERNELS: tuple[str, ...] = ("fused", "fused_uvm", "fused_uvm_caching", "dense")
"""torchrec's compute kernels."""
HOST_KERNELS = ("fused_uvm", "fused_uvm_caching")
"""Kernels of tables in the host's memory, which a GPU reads from there."""


# Rounding errors are half of the last bit: 2^-11 with fp16's 10 bits of mantissa, 2^-8 with the 7
# of bf16.
RowType = Literal["fp32", "fp16", "bf16"]
PRECISIONS = {"fp32": CommType.FP32, "fp16": CommType.FP16, "bf16": CommType.BF16}


@dataclass(frozen=True, kw_only=True)
class QuantizedComms:
    """The types in which looked up rows and their gradients are sent between ranks: fp32, fp16 or
    bf16.

    Not the same numbers as unsharded: fp16 rounds rows at 5e-4 of their size, bf16 gradients at
    4e-3.
    """

    forward: RowType = "fp32"
    """Type of rows, in the output dist."""
    backward: RowType = "fp32"
    """Type of their gradients, sent back in backward; fp16 overflows above 65,504 and underflows
    below 6e-8."""

    def __post_init__(self) -> None:
        plain_fields(self)

    @property
    def is_exact(self) -> bool:
        """Whether nothing is rounded."""
        return self.forward == self.backward == "fp32"

    def registry(self) -> dict[str, Any] | None:
        """Return what torchrec's sharders take; None where nothing is rounded."""
        # Tables with a registry of codecs cannot take the short path (pooled_sharding in
        # _compat/torchrec_ids.py).
        if self.is_exact:
            return None
        config = QCommsConfig(
            forward_precision=PRECISIONS[self.forward], backward_precision=PRECISIONS[self.backward]
        )
        return dict(get_qcomm_codecs_registry(config))


ShardingByTable = dict[str, ParameterSharding]
"""Full name of a table -> its sharding type and which rank holds which shard, as torchrec takes
it."""


class _PooledSharder(EmbeddingBagCollectionSharder):
    """torchrec's sharder without its list of types, which hides row-wise sharding on CPU, where it
    works."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(POOLED_TYPES)


def sharders() -> list[ModuleSharder[nn.Module]]:
    """Return the sharders of the two kinds of collection."""
    return [_PooledSharder(), EmbeddingCollectionSharder()]  # type: ignore[list-item]


def sharder_of(table: Table, comms: QuantizedComms) -> BaseEmbeddingSharder:
    """Return the sharder of `table`'s collection, which exchanges rows and gradients in the types
    of `comms`."""
    kind = _PooledSharder if table.pooled else EmbeddingCollectionSharder
    return kind(qcomm_codecs_registry=comms.registry())


_INSTEAD = {
    "batch_sizes": "batch_size_per_rank of the strategy",
    "bounds_check_mode": "check_ids of the strategy",
    "device_group": "accelerator of the Trainer",
    "output_dtype": "precision of the Trainer",
}


def as_table_options(constraints: ParameterConstraints) -> dict[str, Any]:
    """Return options of one table that say the same. Raises ConfigError: there are none."""
    default = ParameterConstraints()
    names = (
        "sharding_types",
        "compute_kernels",
        "min_partition",
        "pooling_factors",
        "cache_params",
    )
    for name in _changed(constraints, default, names):
        _refuse("ParameterConstraints", name, getattr(constraints, name))
    options = {name: getattr(constraints, name) for name in names[:3]}
    factors = constraints.pooling_factors
    if len(set(factors)) > 1:
        raise ConfigError(
            f"pooling_factors={factors}: one pooling_factor is for all features of a table. Set "
            "their mean."
        )
    if factors != default.pooling_factors:
        options["pooling_factor"] = factors[0]
    cache = constraints.cache_params
    if cache is not None:
        for name in _changed(cache, CacheParams(), ("load_factor", "stats")):
            _refuse("CacheParams", name, getattr(cache, name))
        options["cache_load_factor"] = cache.load_factor
    return options


def as_comms(value: Any) -> Any:
    """Return a QCommsConfig as a dict of our options; other values as they are.

    Raises ConfigError: it rounds in a way that quantized_comms has no option for.
    """
    if not isinstance(value, QCommsConfig):
        return value
    names = ("forward_precision", "backward_precision")
    for name in _changed(value, QCommsConfig(), names):
        _refuse("quantized_comms: QCommsConfig", name, getattr(value, name))
    words = {precision: word for word, precision in PRECISIONS.items()}
    # An unknown precision keeps its own word, which the options refuse.
    precisions = [getattr(value, name) for name in names]
    forward, backward = (words.get(precision, precision.value) for precision in precisions)
    return {"forward": forward, "backward": backward}


def _changed(value: Any, default: Any, but: tuple[str, ...]) -> list[str]:
    names = [field.name for field in fields(value) if field.name not in but]
    return [name for name in names if getattr(value, name) != getattr(default, name)]


def _refuse(kind: str, name: str, value: Any) -> NoReturn:
    instead = "there is no option that does the same"
    if name in _INSTEAD:
        instead = f"set {_INSTEAD[name]} instead"
    raise ConfigError(f"{kind} has {name}={value!r}. Leave it out: {instead}.")
