"""Sharded training gives the numbers of one unsharded process: optimizers x cuts x pooling, on 2
and 3 ranks."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.support.click_model import (
    FEATURES,
    ClickModel,
    SequenceModel,
    seeded,
    train_sharded,
    train_unsharded,
)
from tests.support.parameters import slow_except
from tests.support.plain_loop import limit_of
from tests.support.ranks import run_on_warm_ranks

STEPS = 8
CUTS = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "data_parallel",
)
POOLINGS = {
    "sum": (PoolingType.SUM, False),
    "mean": (PoolingType.MEAN, False),
    "weighted": (PoolingType.SUM, True),
}
OPTIMIZERS: dict[str, tuple[type, dict[str, Any], str]] = {
    "SGD": (torch.optim.SGD, {"lr": 1.0}, "fused"),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "dense"),
    "SGD nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, "dense"),
    "SGD weight_decay": (torch.optim.SGD, {"lr": 0.5, "weight_decay": 0.05}, "dense"),
    # Its first steps are of size lr whatever the gradient: rounding of gradients that cancel shows
    # at lr's scale.
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.02}, "fused"),
    "Adagrad eps": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-3}, "fused"),
    "Adagrad initial": (
        torch.optim.Adagrad,
        {"lr": 0.1, "initial_accumulator_value": 0.1},
        "fused",
    ),
    "Adagrad weight_decay": (torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.05}, "dense"),
    "Adagrad lr_decay": (torch.optim.Adagrad, {"lr": 0.02, "lr_decay": 0.1}, "dense"),
    "RowWiseAdagrad": (RowWiseAdagrad, {"lr": 0.1}, "fused"),
    "RowWiseAdagrad initial": (
        RowWiseAdagrad,
        {"lr": 0.1, "initial_accumulator_value": 0.1},
        "fused",
    ),
    "Adam": (torch.optim.Adam, {"lr": 0.001}, "dense"),
    "Adam amsgrad": (
        torch.optim.Adam,
        {"lr": 0.003, "weight_decay": 0.1, "amsgrad": True},
        "dense",
    ),
    "AdamW": (torch.optim.AdamW, {"lr": 0.001, "weight_decay": 0.1}, "dense"),
    # Gradients that cancel to 1e-9 must not become steps of the full rate: that would compare
    # rounding, not sharding.
    "RMSprop": (
        torch.optim.RMSprop,
        {"lr": 0.003, "momentum": 0.5, "centered": True, "eps": 1e-5},
        "dense",
    ),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}, "dense"),
}
USUAL = [
    *product(
        ("SGD", "SGD momentum", "Adagrad eps", "RowWiseAdagrad", "Adam amsgrad", "AdamW"), (2,)
    ),
    *product(("Adagrad", "RMSprop"), (3,)),
]


def cuts_for(name: str) -> tuple[str, ...]:
    """Return the cuts that the optimizer has an exact form for."""
    return tuple(cut for cut in CUTS if not (name.startswith("RowWise") and "column" in cut))


class EveryCut(ClickModel):
    """One collection for each pooling, one table for each cut; the features are shared by all of
    them."""

    def __init__(self, optimizer: type, options: dict[str, Any], cuts: tuple[str, ...]) -> None:
        self.cuts = cuts
        super().__init__(optimizer, options)

    def _build(self) -> None:
        collections = nn.ModuleDict()
        width = 0
        for pooling, (kind, weighted) in POOLINGS.items():
            configs = [
                EmbeddingBagConfig(
                    name=f"{pooling}_{cut}",
                    embedding_dim=(8, 16)[i % 2],
                    num_embeddings=61 + i,
                    feature_names=[FEATURES[i % 4], FEATURES[(i + 1) % 4]],
                    pooling=kind,
                )
                for i, cut in enumerate(self.cuts)
            ]
            collections[pooling] = EmbeddingBagCollection(tables=configs, is_weighted=weighted)
            width += sum(2 * config.embedding_dim for config in configs)
        self.ebc = collections
        self.first = nn.Linear(width, 56, bias=False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        columns = []
        for name, collection in self.ebc.items():
            weights = batch["weights"] if POOLINGS[name][1] else None
            features = KeyedJaggedTensor(
                FEATURES, batch["ids"], weights=weights, lengths=batch["lengths"]
            )
            columns.append(collection(features).values())
        return self.mlp(self.first(torch.cat(columns, 1))).squeeze(-1)


def _options(cuts: tuple[str, ...]) -> dict[str, Any]:
    return {
        f"{pooling}_{cut}": {
            "sharding_types": [cut],
            **({"min_partition": 4} if "column" in cut else {}),
        }
        for pooling in POOLINGS
        for cut in cuts
    }


def _train(name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    optimizer, options, _ = OPTIMIZERS[name]
    model = seeded(EveryCut, optimizer, options, cuts_for(name))
    kinds: dict[str, str] = {}

    def look() -> None:
        setup = model.trainer.strategy.run_tables
        for table, update in setup.updates.items():
            kinds[table.split(".")[-1]] = f"{update.kind} {setup.shards.plan[table].sharding_type}"

    model.on_train_start = look  # type: ignore[method-assign]
    train_sharded(model, STEPS, {"tables": _options(cuts_for(name))})
    return model.final_state, kinds


@pytest.mark.parametrize(("name", "num_ranks"), slow_except(USUAL, product(OPTIMIZERS, (2, 3))))
def test_sharded_weights_equal_those_of_one_unsharded_process(name: str, num_ranks: int) -> None:
    state, kinds = run_on_warm_ranks(_train, num_ranks, name)[0]
    optimizer, options, kind = OPTIMIZERS[name]
    start = seeded(EveryCut, optimizer, options, cuts_for(name))
    expected = train_unsharded(start, STEPS, num_ranks).final_state
    for pooling in POOLINGS:
        for cut in cuts_for(name):
            table = f"{pooling}_{cut}"
            assert kinds[table] == f"{'dense' if cut == 'data_parallel' else kind} {cut}"
    differences = {key: float((state[key] - expected[key]).abs().max()) for key in expected}
    moved = {key: float((start.state_dict()[key] - expected[key]).abs().max()) for key in expected}
    assert state.keys() == expected.keys()
    assert min(moved.values()) > 1e-4, moved
    too_far = {key: value for key, value in differences.items() if not value <= limit_of(name)}
    assert not too_far, f"{name} on {num_ranks} ranks: {too_far}"
    print(f"{name:24s} {num_ranks} ranks: largest difference {max(differences.values()):.1e}")


def _train_sequences(name: str, cuts: tuple[str, ...]) -> dict[str, Any]:
    optimizer, options, _ = OPTIMIZERS[name]
    results = {}
    for cut in cuts:
        model = seeded(SequenceModel, optimizer, options)
        strategy = {
            "sharding_types": [cut],
            "tables": {"wide": {"min_partition": 4}, "narrow": {"min_partition": 4}},
        }
        model, _ = train_sharded(model, STEPS, strategy)
        results[cut] = model.final_state
    return results


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    slow_except(
        [("SGD", 2), ("Adagrad initial", 3), ("RowWiseAdagrad", 2)],
        product(["SGD", "Adagrad", "Adagrad initial", "RowWiseAdagrad"], (2, 3)),
    ),
)
def test_sharded_sequence_tables_equal_those_of_one_unsharded_process(
    name: str, num_ranks: int
) -> None:
    cuts = ("table_wise", "row_wise") + (() if name == "RowWiseAdagrad" else ("column_wise",))
    sharded = run_on_warm_ranks(_train_sequences, num_ranks, name, cuts)[0]
    optimizer, options, _ = OPTIMIZERS[name]
    expected = train_unsharded(
        seeded(SequenceModel, optimizer, options), STEPS, num_ranks
    ).final_state
    for cut, state in sharded.items():
        assert state.keys() == expected.keys()
        difference = max(float((state[key] - expected[key]).abs().max()) for key in expected)
        assert difference <= limit_of(name), f"{name} {cut}: {difference}"
