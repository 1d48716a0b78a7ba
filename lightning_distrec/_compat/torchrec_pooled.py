"""How torchrec has sharded a pooled collection, where that is simple. Private names of torchrec are used here only."""

from dataclasses import dataclass
from typing import Any

from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection


@dataclass(frozen=True)
class PooledSharding:
    """How torchrec has sharded a pooled collection of one sharding type, with at most one kernel on each rank."""

    group: Any
    features: list[list[str]]
    """Rank -> the features that its kernel looks up, in order."""
    names: list[str]
    """The outputs, in the order in which the ranks' columns are received."""
    widths: list[list[int]]
    """Rank -> the columns of each of its outputs; row-wise, all ranks have partial sums of the same."""
    num_rows: list[int] | None
    """Row-wise: the rows of each feature's table, of which rank r has the r-th block; None: table-wise."""
    divisor: int
    """By which gradients of rows are divided, for the mean over the ranks' losses."""


def pooled_sharding(sharded: Any) -> PooledSharding | None:
    """Return how a collection is sharded; None: not in the simple way that `PooledSharding` describes.

    Source: ShardedEmbeddingBagCollection, TwPooledEmbeddingSharding and RwPooledEmbeddingSharding; comm_ops.py divides
    the gradients. The result is the same on all ranks.
    """
    if type(sharded) is not ShardedEmbeddingBagCollection or len(sharded._embedding_shardings) != 1:
        return None
    (sharding,), (kind,) = sharded._embedding_shardings, sharded._sharding_types
    if kind not in ("table_wise", "row_wise") or sharding.qcomm_codecs_registry:
        return None
    of_ranks = sharding._grouped_embedding_configs_per_rank
    configs = [config for of_rank in of_ranks for config in of_rank]
    if max(map(len, of_ranks)) > 1 or any(map(_is_special, configs)):
        return None
    rows = None
    if kind == "row_wise":
        rows = [table.num_embeddings for table in configs[0].embedding_tables for _ in table.feature_names]
    return PooledSharding(
        group=sharding._pg,
        features=[[name for config in of_rank for name in config.feature_names()] for of_rank in of_ranks],
        names=sharding.embedding_names(),
        widths=[[width for config in of_rank for width in config.embedding_dims()] for of_rank in of_ranks],
        num_rows=rows,
        divisor=sharding._pg.size() if get_gradient_division() else 1,
    )


def _is_special(config: Any) -> bool:
    is_fused = config.compute_kernel == EmbeddingComputeKernel.FUSED
    in_buckets = any(of.total_num_buckets or of.use_virtual_table for of in config.embedding_tables)
    return config.is_weighted or config.has_feature_processor or in_buckets or not is_fused
