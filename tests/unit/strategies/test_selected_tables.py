"""What becomes of tables without rows when they are selected: no ranks."""

from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from lightning_distrec import TorchRecShardedStrategy, meta_tables
from lightning_distrec.errors import ShardingError
from lightning_distrec.strategies.tables.decisions import select_tables
from lightning_distrec.strategies.tables.set_up_inputs import Decisions

ROWS, WIDTH = 40, 8


def _selected(root: nn.Module, **options: Any) -> Decisions:
    return select_tables(root, TorchRecShardedStrategy(**options).table_settings)


def _root() -> Any:
    root = nn.Module()
    with meta_tables("all"):
        root.users = nn.Embedding(ROWS, WIDTH)
    nn.init.constant_(root.users.weight, 0.25)
    return root


def test_a_table_of_dynamic_ids_has_what_was_written_in_all_of_its_rows() -> None:
    dynamic = {"users": {"ids": "dynamic", "rows": 64, "buckets": 8}}
    (table,) = _selected(_root(), convert_embeddings="all", tables=dynamic).tables
    assert table.parameter.shape == (64, WIDTH)
    rows = torch.empty(24, WIDTH)
    table.parameter.record.fill(rows, 40)  # type: ignore[attr-defined]
    assert bool((rows == 0.25).all())
    root = _root()
    root.users.weight.data[3] = 1.0
    with pytest.raises(
        ShardingError, match=r"Embedding\(40, 8\) gets 64 rows, and fill_ wrote to its row 3 before"
    ):
        _selected(root, convert_embeddings="all", tables=dynamic)


def test_a_collection_that_stays_whole_gets_its_rows_and_knows_where_they_are() -> None:
    root: Any = nn.Module()
    config = EmbeddingBagConfig(
        name="t", num_embeddings=ROWS, embedding_dim=WIDTH, feature_names=["f"]
    )
    with meta_tables():
        root.bags = EmbeddingBagCollection([config])
    nn.init.constant_(root.bags.embedding_bags["t"].weight, 0.25)
    assert _selected(root, tables={"t": {"replicated": True}}).tables == []
    weight = root.bags.embedding_bags["t"].weight
    assert bool((weight == 0.25).all())
    assert root.bags.device == weight.device == torch.device("cpu")
    root.bags.reset_parameters()
    assert not bool((weight == 0.25).any())
