"""quantized_comms: rows and gradients travel as 16-bit numbers; told, and close to the truth."""

import io
from contextlib import redirect_stdout

import pytest
import torch

from lightning_distrec import QuantizedComms
from lightning_distrec.errors import ConfigError
from tests.support.click_model import ClickModel, largest_difference, rank_loader, seeded
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

STEPS = 12
LIMIT = 5e-4
"""Largest difference of a weight after STEPS steps; rows travel with 11 bits, gradients with 8."""


def fit_each(cut: str) -> dict[str, dict[str, torch.Tensor]]:
    ways = {
        "exact": None,
        "fp16": {"forward": "fp16"},
        "both": {"forward": "fp16", "backward": "bf16"},
    }
    states = {}
    for name, comms in ways.items():
        model = seeded(ClickModel, torch.optim.SGD, {"lr": 0.1})
        trainer = make_trainer({"sharding_types": [cut], "quantized_comms": comms})
        trainer.fit(model, rank_loader(STEPS, rank_and_num_ranks()[0]))
        states[name] = model.final_state
    return states


@pytest.mark.parametrize("cut", ["table_wise", "row_wise", "column_wise"])
def test_rounded_rows_and_gradients_train_nearly_the_same_weights(cut):
    states = run_on_warm_ranks(fit_each, 2, cut)[0]
    for name in ("fp16", "both"):
        difference = max(largest_difference(states["exact"], states[name]).values())
        assert 0 < difference < LIMIT, f"{name}: {difference}"


def start_table() -> str:
    model = seeded(ClickModel, torch.optim.SGD, {"lr": 0.1})
    with redirect_stdout(io.StringIO()) as message:
        make_trainer({"quantized_comms": {"forward": "fp16", "backward": "bf16"}}).fit(
            model, rank_loader(1, 0)
        )
    return " ".join(message.getvalue().split())


def test_the_start_table_shows_that_numbers_are_rounded():
    message = run_on_warm_ranks(start_table, 1)[0]
    assert "rows are sent as fp16, their gradients as bf16, which rounds them" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"forward": "fp8"}, "'fp8' is not known"),
        ({"onward": "fp16"}, "there is no option 'onward'"),
    ],
)
def test_unknown_types_are_refused(options, message):
    from lightning_distrec import TorchRecShardedStrategy

    with pytest.raises(ConfigError, match=message):
        TorchRecShardedStrategy(quantized_comms=options)


def test_the_default_is_exact():
    assert QuantizedComms().is_exact
    assert QuantizedComms().registry() is None
