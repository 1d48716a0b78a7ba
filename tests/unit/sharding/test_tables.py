"""Finding tables."""

import pytest
from torch import nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingConfig,
)
from torchrec.modules.embedding_configs import DataType

from lightning_distrec.errors import ShardingError
from lightning_distrec.sharding.tables import find_tables


def bags(**changes: object) -> EmbeddingBagCollection:
    """Return a collection of one table."""
    options = {
        "name": "t",
        "embedding_dim": 8,
        "num_embeddings": 10,
        "feature_names": ["f"],
    } | changes
    return EmbeddingBagCollection(tables=[EmbeddingBagConfig(**options)])


def test_a_collection_with_a_dim_that_is_no_multiple_of_four_is_left_alone_with_the_next_that_is() -> (
    None
):
    root = nn.Module()
    root.even, root.odd = bags(), bags(embedding_dim=10)
    pair = [
        EmbeddingConfig(name=f"t{dim}", embedding_dim=dim, num_embeddings=5) for dim in (16, 10)
    ]
    root.mixed = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(**vars(c) | {"feature_names": [c.name]}) for c in pair]
    )
    actual = find_tables(root)
    assert [table.full_name for table in actual.tables] == ["even.t"]
    assert [table.full_name for table in actual.odd_tables] == ["odd.t", "mixed.t16", "mixed.t10"]
    message = (
        "table '{}' has embedding_dim=10, but FBGEMM's rows come in multiples of 4 columns, "
        "so that only "
    )
    message += "embedding_dim=12 would be sharded"
    assert actual.left_alone == {"odd": message.format("t"), "mixed": message.format("t10")}


def test_a_weight_of_a_sharded_table_and_of_a_collection_that_is_left_alone_is_reported() -> None:
    root = nn.Module()
    odd = EmbeddingBagConfig(name="o", embedding_dim=10, num_embeddings=5, feature_names=["g"])
    is_equal = EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=10, feature_names=["f"])
    root.first, root.second = bags(), EmbeddingBagCollection(tables=[odd, is_equal])
    root.first.embedding_bags["t"].weight = root.second.embedding_bags["t"].weight
    with pytest.raises(ShardingError, match="tables 'second.t' and 'first.t' share one weight"):
        find_tables(root)
    root.first, root.second = bags(embedding_dim=10), bags(embedding_dim=10)
    root.second.embedding_bags["t"].weight = root.first.embedding_bags["t"].weight
    assert find_tables(root).left_alone.keys() == {"first", "second"}, "both stay, with one weight"


@pytest.mark.parametrize(
    ("setting", "value", "advice"),
    [
        ("num_embeddings_post_pruning", 5, "all its rows. Leave it out"),
        ("use_virtual_table", True, "Leave it out; for ids of any range set ids='dynamic'"),
    ],
)
def test_settings_of_a_table_that_training_cannot_follow_are_refused(
    setting: str, value: object, advice: str
) -> None:
    root = nn.Module()
    root.ebc = bags(**{setting: value})
    with pytest.raises(ShardingError, match=f"table 'ebc.t' has {setting}={value}.*{advice}"):
        find_tables(root)


def test_a_data_type_that_cannot_be_trained_is_reported() -> None:
    root = nn.Module()
    root.ebc = bags(data_type=DataType.BF16)
    with pytest.raises(ShardingError, match="table 'ebc.t': data_type=BF16.*Use FP32 or FP16"):
        find_tables(root)
