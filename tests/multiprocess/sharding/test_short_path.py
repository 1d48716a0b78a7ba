"""Lookups on the short path leave the bits of torchrec's own exchanges: losses, weights and
optimizer state."""

from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_distrec.sharding.lookup import ids_exchange, sharded_lookup
from tests.support.click_model import FEATURES, ClickModel, bag_configs, seeded, train_sharded
from tests.support.ranks import run_on_warm_ranks

CUTS = ("table_wise", "row_wise")
POOLINGS = ("sum", "mean")
OPTIMIZERS: dict[str, tuple[type, dict[str, Any], str]] = {
    "SGD fused": (torch.optim.SGD, {"lr": 0.7}, "fused"),
    "Adagrad fused": (torch.optim.Adagrad, {"lr": 0.1}, "fused"),
    "RowWiseAdagrad fused": (RowWiseAdagrad, {"lr": 0.1}, "fused"),
    "Adagrad sparse": (torch.optim.Adagrad, {"lr": 0.1}, "sparse"),
    "Adam dense": (torch.optim.Adam, {"lr": 0.01}, "dense"),
}
STEPS = 7


class ReadsByKey(ClickModel):
    """Gives features in another order than that of the tables, and reads outputs by key, one of
    them twice."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        keys = ["a", "d", "c", "b"]
        rows = self.ebc(KeyedJaggedTensor(keys=keys, values=batch["ids"], lengths=batch["lengths"]))
        actual = [rows[name] for name in rows.keys()]  # noqa: SIM118
        return self.mlp(torch.cat(actual, 1)).squeeze(-1) + (actual[0] * actual[0]).sum(1)


class TwoCollections(ClickModel):
    """Looks up two collections in a step, of which the second has its own tables, and is called
    twice."""

    def _build(self) -> None:
        super()._build()
        self.second = EmbeddingBagCollection(tables=bag_configs(self.pooling))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        rows = (
            self.ebc(features).values()
            - self.second(features).values() * self.second(features).values()
        )
        return self.mlp(rows).squeeze(-1)


def _train(
    short: bool, model: type, update: str, cut: str, trainer: dict[str, Any], *arguments: Any
) -> Any:
    """Return losses and weights, and how many batches went the short path."""
    sent: list[int] = []

    class Counted(ids_exchange.ShortExchange):
        def send_ids(self) -> None:
            sent.append(1)
            super().send_ids()

    strategy = {
        "embedding_update": update,
        "sharding_types": [cut],
        "tables": {name: {"min_partition": 4} for name in ("ebc.narrow", "ebc.shared")},
    }
    torch.manual_seed(3)
    with patch.object(ids_exchange, "ShortExchange", Counted):
        if short:
            actual, _ = train_sharded(seeded(model, *arguments), STEPS, strategy, **trainer)
        else:
            with patch.object(sharded_lookup, "short_path_of", lambda *_: None):
                actual, _ = train_sharded(seeded(model, *arguments), STEPS, strategy, **trainer)
    return actual.losses, actual.final_state, len(sent)


def _difference(
    model: type, optimizer: str, cut: str, pooling: str, trainer: dict[str, Any]
) -> str:
    """Train both ways; return what differs."""
    kind, options, update = OPTIMIZERS[optimizer]
    arguments = (model, update, cut, trainer, kind, options, pooling)
    losses, state, sent = _train(True, *arguments)
    other_losses, other_state, none = _train(False, *arguments)
    assert len(losses) == STEPS
    assert state
    if sent < STEPS / 2 or none:
        return f"{sent} of {STEPS} batches went the short path, and {none} where it was off"
    if losses != other_losses:
        return f"losses {losses} and {other_losses}"
    return ", ".join(
        key for key, value in state.items() if not torch.equal(value, other_state[key])
    )


def _differences(cases: list[tuple[Any, ...]]) -> dict[str, str]:
    return {str(case): actual for case in cases if (actual := _difference(*case))}


def test_the_short_path_leaves_the_same_bits() -> None:
    few = [
        (ClickModel, "SGD fused", "table_wise", "sum", {}),
        (ReadsByKey, "Adagrad fused", "table_wise", "mean", {}),
        (ReadsByKey, "RowWiseAdagrad fused", "row_wise", "mean", {}),
        (
            ClickModel,
            "Adam dense",
            "row_wise",
            "sum",
            {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        ),
    ]
    assert run_on_warm_ranks(_differences, 2, few) == [{}, {}]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_short_path_leaves_the_same_bits_in_all_cases(num_ranks: int) -> None:
    cases: list[tuple[Any, ...]] = [
        (model, optimizer, cut, pooling, {})
        for model, optimizer, cut, pooling in product(
            (ClickModel, ReadsByKey), OPTIMIZERS, CUTS, POOLINGS
        )
    ]
    for options in (
        {"precision": "bf16-mixed"},
        {"accumulate_grad_batches": 2},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ):
        cases += [
            (ClickModel, optimizer, cut, "mean", options)
            for optimizer, cut in product(["Adam dense"], CUTS)
        ]
    cases += [
        (TwoCollections, optimizer, cut, "mean", {})
        for optimizer, cut in product(["SGD fused"], CUTS)
    ]
    assert (
        run_on_warm_ranks(_differences, num_ranks, cases, timeout_seconds=300) == [{}] * num_ranks
    )
