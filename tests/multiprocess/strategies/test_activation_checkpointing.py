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
from tests.support.dense_runs import make_dense_trainer, whole_weights
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks

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


def _fit(strategy: Any, kind: type[Any] = Deep) -> dict[str, Any]:
    pl.seed_everything(5)
    model = kind()
    forwards = [vars(layer).get("forward") for layer in model.layers]
    trainer = make_dense_trainer(strategy, max_epochs=1)
    trainer.fit(model, loader(*rank_and_num_ranks(), batch_size=8))
    after = [vars(layer).get("forward") for layer in model.layers]
    assert after == forwards, "layers are as before"
    # The least of all steps: in some, FSDP frees a buffer of an exchange later.
    kept = min(model.kept)
    return {"losses": model.losses, "weights": whole_weights(trainer), "kept": kept}


def _ddp(option: Any) -> dict[str, Any]:
    return _fit(TunedDDPStrategy(activation_checkpointing=option))


def _fsdp(option: Any) -> dict[str, Any]:
    return _fit(TunedFSDPStrategy(wrap=["Layer"], activation_checkpointing=option))


class Flat(Recording):
    """No layers that repeat."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


REFUSED: dict[str, tuple[Any, type]] = {
    "the module has no 'Laye', neither as a class nor as a path. Did you mean 'Layer'": (
        ["Laye"],
        Deep,
    ),
    "'layers.0.up' is inside of 'layers.0', which recomputes it already": (
        ["layers.0", "layers.0.up"],
        Deep,
    ),
    "activation_checkpointing=True: the module has no layers of parts that repeat": (True, Flat),
}


def _refusal(option: Any, kind: type[Any]) -> str:
    with pytest.raises(ConfigError) as refused:
        _fit(TunedDDPStrategy(activation_checkpointing=option), kind)
    return str(refused.value)


CASES: dict[str, tuple[Any, ...]] = {
    "ddp": (_ddp, False),
    "ddp, all": (_ddp, True),
    "ddp, by path": (_ddp, ["layers.0", "layers.3"]),
    "fsdp": (_fsdp, False),
    "fsdp, all": (_fsdp, True),
}


def test_recomputing_changes_no_bit_and_keeps_less_or_is_refused() -> None:
    refusals = {message: (_refusal, *arguments) for message, arguments in REFUSED.items()}
    for rank in run_each_on_ranks(CASES | refusals, 2):
        for case in ("ddp, all", "ddp, by path", "fsdp, all"):
            plain = rank[case.partition(",")[0]]
            assert rank[case]["losses"] == plain["losses"]
            for name, value in plain["weights"].items():
                assert torch.equal(rank[case]["weights"][name], value), name
        kept = {case: rank[case]["kept"] for case in CASES}
        assert kept["ddp, all"] < 0.35 * kept["ddp"]
        assert kept["ddp, all"] < kept["ddp, by path"] < kept["ddp"]
        assert kept["fsdp, all"] < kept["fsdp"]
        for message in REFUSED:
            assert message in rank[message]
