"""Layers that recompute their activations: bitwise the same numbers, and less memory."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_distrec import TunedDDPStrategy, TunedFSDPStrategy
from lightning_distrec.errors import ConfigError
from tests.support.dense_models import WIDTH, Recording, loader
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS

NUM_LAYERS, HIDDEN = 4, 2048


class Deep(Recording):
    """Layers that write buffers and draw random numbers; what they keep for backward is counted in
    each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer() for _ in range(NUM_LAYERS)))
        self.out = nn.Linear(WIDTH, 1)
        self.kept: list[int] = []

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.layers(inputs))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory:
            loss = super().training_step(batch, batch_idx)
        # What a forward allocates and does not free is what backward needs.
        self.kept.append(sum(event.self_cpu_memory_usage for event in memory.key_averages()))
        return loss


class Layer(nn.Module):
    """A layer that keeps much for its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.down(self.drop(self.up(self.norm(inputs)).tanh()))


def _fit(strategy: Any, kind: type[Deep] = Deep, **settings: Any) -> dict[str, Any]:
    pl.seed_everything(5)
    rank, num_ranks = rank_and_num_ranks()
    model = kind()
    forwards = [vars(layer).get("forward") for layer in model.layers]
    trainer = pl.Trainer(strategy=strategy, devices=num_ranks, **DEFAULTS | settings)
    trainer.fit(model, loader(rank, num_ranks, batch_size=8))
    assert [vars(layer).get("forward") for layer in model.layers] == forwards, (
        "layers are as before"
    )
    weights = (
        model.state_dict()
        if isinstance(strategy, TunedDDPStrategy)
        else trainer.strategy.full_state_dict()
    )
    weights = {name: value.clone() for name, value in weights.items()}
    # The least of all steps: in some, FSDP frees a buffer of an exchange later.
    return {"losses": model.losses, "weights": weights, "kept": min(model.kept)}


def _ddp(option: Any, **settings: Any) -> dict[str, Any]:
    return _fit(TunedDDPStrategy(activation_checkpointing=option), **settings)


def _fsdp(option: Any) -> dict[str, Any]:
    return _fit(TunedFSDPStrategy(wrap=["Layer"], activation_checkpointing=option))


REFUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "activation_checkpointing: the module has no 'Laye', neither as a class nor as a path. Did "
    "you mean 'Layer'": (
        ["Laye"],
        {},
    ),
    "'layers.0.up' is inside of 'layers.0', which recomputes it already": (
        ["layers.0", "layers.0.up"],
        {},
    ),
    "activation_checkpointing=True: the module has no layers of parts that repeat": (
        True,
        {"kind": "Flat"},
    ),
}


class Flat(Recording):
    """No layers that repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def _refusal(option: Any, kind: str = "Deep") -> str:
    try:
        _fit(TunedDDPStrategy(activation_checkpointing=option), {"Deep": Deep, "Flat": Flat}[kind])
    except ConfigError as error:
        return str(error)
    return "no error"


CASES: dict[str, tuple[Any, ...]] = {
    "ddp": (_ddp, False),
    "ddp, all": (_ddp, True),
    "ddp, by class": (_ddp, ["Layer"]),
    "ddp, by path": (_ddp, ["layers.0", "layers.3"]),
    "fsdp": (_fsdp, False),
    "fsdp, all": (_fsdp, True),
}


@pytest.fixture(scope="module")
def actual() -> list[dict[str, Any]]:
    refusals = {
        message: (_refusal, option, *extra.values()) for message, (option, extra) in REFUSED.items()
    }
    return run_each_on_ranks(CASES | refusals, 2)


@pytest.mark.parametrize("case", [case for case in CASES if "," in case])
def test_recomputing_changes_no_bit(actual: list[dict[str, Any]], case: str) -> None:
    for rank_result in actual:
        plain = rank_result[case.partition(",")[0]]
        assert rank_result[case]["losses"] == plain["losses"]
        for name, value in plain["weights"].items():
            assert torch.equal(rank_result[case]["weights"][name], value), name


def test_recomputing_layers_keep_less(actual: list[dict[str, Any]]) -> None:
    for rank_result in actual:
        retained = {case: rank_result[case]["kept"] for case in CASES}
        assert retained["ddp, all"] < 0.35 * retained["ddp"]
        assert retained["ddp, all"] < retained["ddp, by path"] < retained["ddp"]
        assert retained["fsdp, all"] < retained["fsdp"]


@pytest.mark.parametrize("message", REFUSED)
def test_layers_that_cannot_recompute_are_refused(
    actual: list[dict[str, Any]], message: str
) -> None:
    for rank_result in actual:
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(rank_result[message])


def test_what_the_option_cannot_be() -> None:
    for strategy in (TunedDDPStrategy, TunedFSDPStrategy):
        with pytest.raises(
            ConfigError,
            match=r"checkpointing='Layer': must be true or false, or a list: write \['Layer'\]",
        ):
            strategy(activation_checkpointing="Layer")
