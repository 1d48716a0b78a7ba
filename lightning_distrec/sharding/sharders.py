"""torchrec's sharding types, kernels and sharders, and the types in which rows and their gradients are exchanged."""

from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.types import ModuleSharder, ParameterSharding

from lightning_distrec.option_values import check_choice
from lightning_distrec.sharding.tables import Table

POOLED_TYPES: tuple[str, ...] = (
    *("table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "data_parallel"),
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


# Rounding errors are half of the last bit: 2^-11 with fp16's 10 bits of mantissa, 2^-8 with the 7 of bf16.
PRECISIONS = {"fp32": CommType.FP32, "fp16": CommType.FP16, "bf16": CommType.BF16}


@dataclass(frozen=True, kw_only=True)
class QuantizedComms:
    """The types in which looked up rows and their gradients are sent between ranks: fp32, fp16 or bf16.

    Not the same numbers as unsharded: fp16 rounds rows at 5e-4 of their size, bf16 gradients at 4e-3.
    """

    forward: str = "fp32"
    """Type of rows, in the output dist."""
    backward: str = "fp32"
    """Type of their gradients, sent back in backward; fp16 overflows above 65,504 and underflows below 6e-8."""

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            check_choice(f"quantized_comms: {name}", getattr(self, name), PRECISIONS)

    @property
    def is_exact(self) -> bool:
        """Whether nothing is rounded."""
        return self.forward == self.backward == "fp32"

    def registry(self) -> dict[str, Any] | None:
        """Return what torchrec's sharders take; None where nothing is rounded."""
        # Tables with a registry of codecs cannot take the short path (pooled_sharding in _compat/torchrec_ids.py).
        if self.is_exact:
            return None
        config = QCommsConfig(forward_precision=PRECISIONS[self.forward], backward_precision=PRECISIONS[self.backward])
        return dict(get_qcomm_codecs_registry(config))


ShardingByTable = dict[str, ParameterSharding]
"""Full name of a table -> its sharding type and which rank holds which shard, as torchrec takes it."""


class _PooledSharder(EmbeddingBagCollectionSharder):
    """torchrec's sharder without its list of types, which hides row-wise sharding on CPU, where it works."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(POOLED_TYPES)


def sharders() -> list[ModuleSharder[nn.Module]]:
    """Return the sharders of the two kinds of collection."""
    return [_PooledSharder(), EmbeddingCollectionSharder()]  # type: ignore[list-item]


def sharder_of(table: Table, comms: QuantizedComms) -> BaseEmbeddingSharder:
    """Return the sharder of `table`'s collection, which exchanges rows and gradients in the types of `comms`."""
    kind = _PooledSharder if table.pooled else EmbeddingCollectionSharder
    return kind(qcomm_codecs_registry=comms.registry())
