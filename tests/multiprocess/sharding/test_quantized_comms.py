"""quantized_comms: rows and gradients travel as 16-bit numbers; told, and close to the truth."""

import io
from contextlib import redirect_stdout

import torch

from tests.support.click_model import ClickModel, largest_difference, rank_loader, seeded
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

STEPS = 12
LIMIT = 5e-4
"""Largest difference of a weight after STEPS steps; rows travel with 11 bits, gradients with 8."""


CUTS = {
    "wide": {"sharding_types": ["row_wise"]},
    "narrow": {"sharding_types": ["column_wise"], "min_partition": 4},
    "shared": {"sharding_types": ["table_wise"]},
}
WAYS = {
    "exact": None,
    "fp16": {"forward": "fp16"},
    "both": {"forward": "fp16", "backward": "bf16"},
}


def fit_each() -> tuple[dict[str, dict[str, torch.Tensor]], str]:
    """Return the weights of each way, and what the last one has printed."""
    states = {}
    for name, comms in WAYS.items():
        model = seeded(ClickModel, torch.optim.SGD, {"lr": 0.1})
        with redirect_stdout(io.StringIO()) as printed:
            trainer = make_trainer({"tables": CUTS, "quantized_comms": comms})
            trainer.fit(model, rank_loader(STEPS, rank_and_num_ranks()[0]))
        states[name] = model.final_state
    return states, " ".join(printed.getvalue().split())


def test_rounded_rows_and_gradients_are_told_and_train_nearly_the_same_weights() -> None:
    states, printed = run_on_warm_ranks(fit_each, 2)[0]
    exact = states.pop("exact")
    for name, state in states.items():
        assert max(largest_difference(exact, state).values()) < LIMIT, name
        for key in [key for key in exact if "embedding" in key]:
            assert not torch.equal(exact[key], state[key]), (name, key)
    assert "rows are sent as fp16, their gradients as bf16, which rounds them" in printed
