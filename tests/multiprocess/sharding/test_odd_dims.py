"""Collections whose dim is no multiple of 4 train on every rank, beside sharded ones."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from lightning_distrec.errors import ConfigError, ShardingError
from lightning_distrec.sharding.sharded_tables import sharded_tables_of
from tests.support.click_model import (
    FEATURES,
    ClickModel,
    largest_difference,
    seeded,
    train_sharded,
    train_unsharded,
)
from tests.support.ranks import run_on_warm_ranks

STEPS = 4
SGD = (torch.optim.SGD, {"lr": 0.5})
BAGS, ROWS = EmbeddingBagConfig, EmbeddingConfig


def _config(kind: Any, name: str, dim: int, feature: str) -> Any:
    return kind(name=name, embedding_dim=dim, num_embeddings=60, feature_names=[feature])


class OddDims(ClickModel):
    """Looks up tables of dims 16, 10, and both in one collection, beside those of the click
    model."""

    def __init__(self) -> None:
        super().__init__(*SGD)
        self.bags = EmbeddingBagCollection(tables=[_config(BAGS, "ten", 10, "a")])
        self.mixed = EmbeddingBagCollection(
            tables=[_config(BAGS, "even", 16, "b"), _config(BAGS, "six", 6, "c")]
        )
        self.rows = EmbeddingCollection(tables=[_config(ROWS, "ten", 10, "d")])
        self.head = nn.Linear(42, 1, bias=False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        rows = self.rows(features)["d"]
        owner = torch.repeat_interleave(torch.arange(len(rows.lengths())), rows.lengths())
        summed = torch.zeros(len(rows.lengths()), 10).index_add(0, owner, rows.values())
        odd = torch.cat([self.bags(features).values(), self.mixed(features).values(), summed], 1)
        return super().forward(batch) + self.head(odd).squeeze(-1)


class OnlyOdd(OddDims):
    """Builds its odd tables in configure_model, and has no others."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = self.mixed = self.rows = self.bags = None

    def configure_model(self) -> None:
        if self.bags is None:
            torch.manual_seed(3)
            self.bags = EmbeddingBagCollection(tables=[_config(BAGS, "ten", 10, "a")])

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        return self.bags(features).values().sum(1) + 0 * (
            self.head.weight.sum() + self.mlp(torch.zeros(56))
        )


REFUSED: dict[str, tuple[type[Exception], str]] = {
    "bags.ten": (
        ShardingError,
        r"tables\['bags.ten'\]: 'bags.ten' cannot be sharded: table 'ten' has embedding_dim=10, .*set replicated=True",
    ),
    "even": (
        ShardingError,
        r"tables\['even'\]: 'mixed.even' cannot be sharded: table 'six' has embedding_dim=6, .*collection of their own",
    ),
    "ro*": (ShardingError, r"tables\['ro\*'\]: 'rows.ten' cannot be sharded"),
    "seven": (ConfigError, "there is no table 'seven'.*The tables are ebc.wide.*bags.ten"),
}


def _train() -> dict[str, Any]:
    message = {}
    for name in REFUSED:
        try:
            train_sharded(seeded(OddDims), 1, {"tables": {name: {"sharding_types": ["row_wise"]}}})
        except (ShardingError, ConfigError) as error:
            message[name] = f"{type(error).__name__}: {error}"
    options = {"tables": {"*": {"sharding_types": ["row_wise"]}, "rows.ten": {"replicated": True}}}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, _ = train_sharded(seeded(OddDims), STEPS, options)
    shards = sharded_tables_of(model)
    assert shards is not None
    only, _ = train_sharded(seeded(OnlyOdd), STEPS)
    return {
        "said": message,
        "warnings": [str(w.message) for w in caught if "is not sharded" in str(w.message)],
        "state": model.final_state,
        "sharded": sorted(shards.plan),
        "only": only.final_state,
    }


def test_odd_dims_train_beside_sharded_tables_to_the_numbers_of_an_unsharded_run() -> None:
    ranks = run_on_warm_ranks(_train, 2)
    start = seeded(OddDims)
    expected = train_unsharded(start, STEPS, 2)
    for key in ("bags.embedding_bags.ten", "mixed.embedding_bags.even", "rows.embeddings.ten"):
        change = expected.get_parameter(f"{key}.weight") - start.get_parameter(f"{key}.weight")
        assert float(change.detach().abs().max()) > 1e-3, "the table has learnt"
    only = seeded(OnlyOdd)
    only.configure_model()
    single = train_unsharded(only, STEPS, 2).final_state
    assert max(largest_difference(ranks[0]["state"], expected.final_state).values()) < 1e-6
    for actual in ranks:
        assert max(largest_difference(actual["only"], single).values()) < 1e-6
        assert actual["sharded"] == ["ebc.narrow", "ebc.shared", "ebc.wide"]
        assert actual["said"].keys() == REFUSED.keys()
        for name, (kind, message) in REFUSED.items():
            with pytest.raises(kind, match=f"{kind.__name__}: .*{message}"):
                raise kind(actual["said"][name])
    columns = "but FBGEMM's rows come in multiples of 4 columns, so that only embedding_dim"
    assert ranks[0]["warnings"] == [
        "'bags' is not sharded, every rank has all of it: table 'ten' has embedding_dim=10, "
        f"{columns}=12 would be "
        "sharded.",
        "'mixed' is not sharded, every rank has all of it: table 'six' has embedding_dim=6, "
        f"{columns}=8 would be "
        "sharded.",
        "'rows' is not sharded, every rank has all of it: table 'ten' has embedding_dim=10, "
        f"{columns}=12 would be "
        "sharded.",
    ]
    assert ranks[1]["warnings"] == []
