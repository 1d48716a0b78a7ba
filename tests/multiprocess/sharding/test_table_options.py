"""What is said about single tables, where tables are really sharded."""

import contextlib
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_distrec.errors import ConfigError, PlanError, ShardingError
from lightning_distrec.sharding.sharded_tables import sharded_tables_of
from tests.support.click_model import (
    FEATURES,
    EvaluatedModel,
    largest_difference,
    rank_loader,
    seeded,
    train_sharded,
    train_unsharded,
)
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

STEPS = 6
ADAM = (torch.optim.Adam, {"lr": 0.003, "eps": 1e-3})
OPTIONS: dict[str, Any] = {
    "convert_embeddings": "all",
    "tables": {
        "ebc.*": {"sharding_types": ["row_wise"], "compute_kernels": ["fused"]},
        "narrow": {"replicated": True},
        "replicated*": {"replicated": True},
        "own_*": {"sharding_types": ["table_wise"]},
    },
}


class Mixed(EvaluatedModel):
    """Tables of one collection, of another one, and plain ones."""

    def __init__(self) -> None:
        super().__init__(*ADAM)
        config = EmbeddingBagConfig(
            name="t", embedding_dim=8, num_embeddings=60, feature_names=["a"]
        )
        self.replicated = EmbeddingBagCollection(tables=[config])
        self.replicated_rows, self.own_rows = nn.Embedding(12, 8), nn.Embedding(12, 8)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        ids = batch["lengths"].view(len(FEATURES), -1)[0]
        rows = self.replicated(features).values() + self.replicated_rows(ids) * self.own_rows(ids)
        return super().forward(batch) + 0.3 * rows.sum(-1)


def _keep() -> dict[str, Any]:
    rank, _ = rank_and_num_ranks()
    model, _ = train_sharded(seeded(Mixed), STEPS, OPTIONS)
    shards = sharded_tables_of(model)
    assert shards is not None
    actual = {
        "state": model.final_state,
        "cuts": {name: sharding.sharding_type for name, sharding in shards.plan.items()},
        "whole": [dict(model.named_parameters())[name].numel() for name in WHOLE],
        "kinds": [type(model.replicated).__name__, type(model.replicated_rows).__name__],
    }
    trainer = make_trainer(OPTIONS)
    trainer.validate(model, rank_loader(2, rank, first=50), verbose=False)
    assert sharded_tables_of(model) is shards, "tables stay as they are for an evaluation"
    trainer.fit(model, rank_loader(STEPS, rank))
    actual["second"] = model.final_state
    changed = OPTIONS | {"tables": OPTIONS["tables"] | {"own_*": {"replicated": True}}}
    with pytest.raises(
        ShardingError, match="'own_rows' was sharded in an earlier run .* would leave it unsharded"
    ):
        make_trainer(changed).fit(model, rank_loader(STEPS, rank))
    return actual


WHOLE = (
    "ebc.embedding_bags.narrow.weight",
    "replicated.embedding_bags.t.weight",
    "replicated_rows.weight",
)


def test_tables_that_are_kept_whole_train_beside_sharded_ones_to_the_numbers_of_an_unsharded_run() -> (
    None
):
    ranks = run_on_warm_ranks(_keep, 2)
    start = seeded(Mixed)
    first = train_unsharded(start, STEPS, 2)
    second = train_unsharded(first, STEPS, 2)
    for state, expected in ((ranks[0]["state"], first), (ranks[0]["second"], second)):
        difference = largest_difference(state, expected.final_state)
        assert max(difference.values()) < 1e-5, difference
    assert (
        float((first.replicated_rows.weight - start.replicated_rows.weight).abs().max()) > 1e-3
    ), "the table has learnt"
    for actual in ranks:
        assert actual["cuts"] == {
            "ebc.wide": "row_wise",
            "ebc.narrow": "data_parallel",
            "ebc.shared": "row_wise",
            "own_rows": "table_wise",
        }
        assert actual["whole"] == [37 * 8, 60 * 8, 12 * 8]
        assert actual["kinds"] == ["EmbeddingBagCollection", "Embedding"]


class OnMeta(Mixed):
    """Builds the collection that is to be kept whole without memory, and says itself that it is to
    be."""

    def table_options(self) -> dict[str, Any]:
        return {"replicated.t": {"replicated": True}, "narrow": {"sharding_types": ["row_wise"]}}

    def configure_model(self) -> None:
        config = EmbeddingBagConfig(
            name="t", embedding_dim=8, num_embeddings=60, feature_names=["a"]
        )
        self.replicated = EmbeddingBagCollection(tables=[config])


REFUSED: dict[str, tuple[type, dict[str, Any], type[Exception], str]] = {
    "kernel": (
        Mixed,
        {"ebc.wide": {"compute_kernels": ["fused_uvm"]}},
        PlanError,
        "table 'ebc.wide': compute_kernels=.*on cpu rows are in the host's memory already; allow "
        "fused",
    ),
    "cache": (
        Mixed,
        {"t": {"cache_load_factor": 0.2}},
        PlanError,
        "table 'replicated.t': cache_load_factor=0.2 is for",
    ),
    "pattern": (
        Mixed,
        {"ebd.*": {"replicated": True}},
        ConfigError,
        r"no table fits 'ebd.\*'.*The tables are ebc.",
    ),
}


def _refuse() -> dict[str, str]:
    message = {}
    for name, (model, tables, _, _) in REFUSED.items():
        try:
            train_sharded(seeded(model), 1, {"convert_embeddings": "all", "tables": tables})
        except (ConfigError, ShardingError) as error:
            message[name] = f"{type(error).__name__}: {error}"
    return message


def _keep_whole() -> dict[str, Any]:
    model = seeded(OnMeta)
    options = {
        "convert_embeddings": "all",
        "tables": {"narrow": {"sharding_types": ["table_wise"]}},
    }
    with contextlib.redirect_stdout(io.StringIO()) as table:
        train_sharded(model, 1, options)
    sharded = sharded_tables_of(model)
    assert sharded is not None
    return model.final_state | {
        "table": table.getvalue(),
        "narrow": sharded.plan["ebc.narrow"].sharding_type,
    }


def test_a_collection_that_is_kept_whole_has_its_rows_from_configure_model() -> None:
    ranks = run_on_warm_ranks(_keep_whole, 2)
    assert "table_options() of 'OnMeta' has options of replicated.t, narrow" in ranks[0]["table"]
    assert ranks[0]["narrow"] == "table_wise", (
        "the strategy's options override those that a module ships"
    )
    first, second = (state["replicated.embedding_bags.t.weight"] for state in ranks)
    assert torch.equal(first, second)
    # torchrec draws them uniformly, up to one by the root of the number of rows; one step moves
    # them a little.
    assert 0.01 < float(first.std()) < 0.5
    assert len(first.unique()) > 400


def test_what_a_table_cannot_be_is_refused_on_every_rank() -> None:
    for actual in run_on_warm_ranks(_refuse, 2):
        assert actual.keys() == REFUSED.keys()
        for name, (_, _, kind, message) in REFUSED.items():
            with pytest.raises(kind, match=f"{kind.__name__}: .*{message}"):
                raise kind(actual[name])
