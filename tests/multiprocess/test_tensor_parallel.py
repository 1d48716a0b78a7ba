"""Layers that `fsdp_tuned(tensor_parallel=...)` splits have the numbers of one process."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_distrec import TunedFSDPStrategy
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.split_models import PLANS, seeded
from tests.support.trainers import DEFAULTS

Outcome = tuple[dict[str, list[float]], dict[str, Tensor]]
"""What a run has logged, and weights."""
DOUBLE = {"precision": "64-true"}
FEWER_STEPS = DOUBLE | {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}


def _fit(kind: str, strategy: Any, settings: dict[str, Any], num_ranks: int) -> Outcome:
    model = seeded(kind)
    options = DEFAULTS | {"max_epochs": 2, "limit_val_batches": 2, **settings}
    trainer = pl.Trainer(strategy=strategy, devices=num_ranks, **options)
    trainer.fit(model)
    is_ours = isinstance(strategy, TunedFSDPStrategy)
    full = trainer.strategy.full_state_dict() if is_ours else model.state_dict()
    logged = {"losses": model.losses, "sums": model.sums, "validated": model.validated}
    return logged, {name: value.clone() for name, value in full.items()}


def _split(kind: str, settings: dict[str, Any], size: int = 2, **options: Any) -> Outcome:
    plan = options.pop("plan", PLANS.get(kind, "auto"))
    parallel = {"size": size, "plan": plan, "compare_first_batch": options.pop("compare", True)}
    strategy = TunedFSDPStrategy(**{"tensor_parallel": parallel, "min_num_parameters": 8, **options})
    return _fit(kind, strategy, settings, rank_and_num_ranks()[1])


def _lone(kind: str, settings: dict[str, Any]) -> Outcome:
    return _split(kind, settings, plan={"net.0": "colwise", "net.8": "rowwise"})


def _check_same(ours: Outcome, alone: Outcome, case: str, most: float) -> None:
    for name, values in alone[0].items():
        assert values, name
        within = max(most, 1e-6) if name == "sums" else most  # a metric is of 32 bits
        assert ours[0][name] == pytest.approx(values, rel=within, abs=within), f"{case}: {name}"
    assert ours[1].keys() == alone[1].keys()
    for name, value in alone[1].items():
        torch.testing.assert_close(ours[1][name], value, atol=most, rtol=most, msg=f"{case}: {name}")


ONE_EPOCH = DOUBLE | {"max_epochs": 1}
CASES: dict[str, tuple[Any, ...]] = {
    "dropout": (_split, "Dropping", ONE_EPOCH),
    "layers without a partner": (_lone, "Perceptron", ONE_EPOCH),
}
OF_FOUR: dict[str, tuple[Any, ...]] = {"transformer": (_split, "SmallGPT", ONE_EPOCH)}


@pytest.mark.parametrize(("num_ranks", "cases"), [(2, CASES), pytest.param(4, OF_FOUR, marks=pytest.mark.slow)])
def test_losses_sums_and_weights_are_those_of_one_process(num_ranks: int, cases: dict[str, tuple[Any, ...]]) -> None:
    first, *_ = run_each_on_ranks(cases, num_ranks)
    for name, (_, kind, settings) in cases.items():
        _check_same(first[name], _fit(kind, "auto", settings, 1), name, 1e-9)


VARIANTS: dict[str, tuple[Any, ...]] = {
    "transformer": ("SmallGPT", DOUBLE, {}),
    "by hand": ("ByHand", DOUBLE, {}),
    "clipped and accumulated": ("SmallGPT", FEWER_STEPS, {}),
    "all for the whole step": ("SmallGPT", DOUBLE, {"wrap": []}),
    "kept after forward": ("SmallGPT", DOUBLE, {"reshard_after_forward": False}),
    "fetched ahead": ("SmallGPT", DOUBLE, {"forward_prefetch": 1, "backward_prefetch": 1}),
    "without the comparison": ("SmallGPT", DOUBLE, {"compare": False}),
    "rows and columns of tables": ("Lookups", DOUBLE, {}),
    "frozen": ("Frozen", DOUBLE, {}),
    "recomputed": ("SmallGPT", DOUBLE, {"activation_checkpointing": True}),
    "recomputed by name": ("SmallGPT", DOUBLE, {"wrap": ["Block"], "activation_checkpointing": ["Gated", "Attention"]}),
    "recomputed by memory": ("SmallGPT", DOUBLE, {"activation_checkpointing": "1KiB"}),
    "32 bits": ("Descending", {}, {}),
    "16 bits": ("Descending", {"precision": "bf16-mixed", "max_epochs": 1}, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_settings_of_fsdp_and_of_the_trainer_leave_the_numbers_as_they_are(num_ranks: int) -> None:
    of_two = {"perceptron": ("Perceptron", DOUBLE, {}), "pairs that are found": ("Pairs", DOUBLE, {})}  # they draw
    variants = VARIANTS | (of_two if num_ranks == 2 else {"all four": ("SmallGPT", DOUBLE, {"size": 4})})
    calls = {name: (_with_options, *variant) for name, variant in variants.items()}
    first, *_ = run_each_on_ranks(calls, num_ranks)
    alone: dict[str, Outcome] = {}
    for name, (kind, settings, _) in variants.items():
        key = f"{kind} {settings}"
        alone.setdefault(key, _fit(kind, "auto", settings, 1))
        within = {"64-true": 1e-9, "bf16-mixed": 5e-2}.get(settings.get("precision", ""), 1e-5)
        within = 1e-6 if "gradient_clip_val" in settings else within  # its norm is of 32 bits
        _check_same(first[name], alone[key], name, within)


def _with_options(kind: str, settings: dict[str, Any], options: dict[str, Any]) -> Outcome:
    return _split(kind, settings, **options)
