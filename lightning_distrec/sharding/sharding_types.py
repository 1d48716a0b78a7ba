"""torchrec's sharding types and kernels: their names, and which of them shard by rows, by columns or on one node."""

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
