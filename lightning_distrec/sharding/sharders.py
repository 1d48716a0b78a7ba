"""torchrec's sharders of the two kinds of collection."""

from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ModuleSharder, ParameterSharding

from lightning_distrec.sharding.quantized_comms import QuantizedComms
from lightning_distrec.sharding.sharding_types import POOLED_TYPES
from lightning_distrec.sharding.tables import Table

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
