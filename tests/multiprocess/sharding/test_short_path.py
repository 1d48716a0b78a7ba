"""Lookups on the short path leave the bits of torchrec's own exchanges: losses, weights and
optimizer state."""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from lightning_distrec.sharding.lookup import ids_exchange, sharded_lookup
from tests.support.click_model import ClickModel, seeded, train_sharded
from tests.support.ranks import run_on_warm_ranks

OPTIMIZERS: dict[str, tuple[type, dict[str, Any], str]] = {
    "Adagrad fused": (torch.optim.Adagrad, {"lr": 0.1}, "fused"),
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
        (ReadsByKey, "Adagrad fused", "table_wise", "mean", {}),
        (
            ClickModel,
            "Adam dense",
            "row_wise",
            "sum",
            {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
        ),
    ]
    assert run_on_warm_ranks(_differences, 2, few) == [{}, {}]
