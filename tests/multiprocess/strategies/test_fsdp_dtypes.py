"""Types of `fsdp_tuned` against hand-written loops over fully_shard."""

from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from lightning_distrec import TunedFSDPStrategy
from tests.support.cases import Case, case_of, check_refused
from tests.support.dense_models import WIDTH, Recording, dense_batch, loader
from tests.support.dense_runs import Outcome, make_dense_trainer, whole_weights
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks

BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
OVERFLOWS = {2: 1}
"""Step -> the rank whose gradients are not finite in it."""


class Blocks(Recording):
    """Two blocks with a buffer each, and a layer beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = Shifted(), Shifted()
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.high(self.low(inputs)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return (
            loss * torch.inf
            if OVERFLOWS.get(len(self.losses) - 1) == rank_and_num_ranks()[0]
            else loss
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.05)


class Shifted(nn.Module):
    """A layer and a shift that does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.full((WIDTH,), 0.301))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.layer(inputs) + self.shift).tanh()


class Finite(Blocks):
    """The same without overflows."""

    training_step = Recording.training_step


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)


def _fit(kind: type[Recording], options: dict[str, Any], settings: dict[str, Any]) -> Outcome:
    pl.seed_everything(5)
    model = kind()
    if "16-mixed" in settings:
        settings = {"plugins": MixedPrecision("16-mixed", "cpu", _scaler())}
    trainer = make_dense_trainer(TunedFSDPStrategy(**options), **settings)
    trainer.fit(model, loader(*rank_and_num_ranks()))
    return model.losses, whole_weights(trainer)


@dataclass(frozen=True)
class ByHand:
    """How a loop over fully_shard computes."""

    blocks: MixedPrecisionPolicy = MixedPrecisionPolicy()
    root: MixedPrecisionPolicy = MixedPrecisionPolicy()
    autocast: torch.dtype | None = None
    is_scaled: bool = False
    is_half: bool = False
    """Whether weights and inputs are in bfloat16."""

    def train(self, kind: type[Recording]) -> Outcome:
        """Collective. Train for two epochs."""
        pl.seed_everything(5)
        model: Any = kind().to(BF16 if self.is_half else FP32)
        for block in (model.low, model.high):
            fully_shard(block, mp_policy=self.blocks)
        fully_shard(model, mp_policy=self.root)
        optimizer = model.configure_optimizers()
        scaler = _scaler() if self.is_scaled else torch.amp.GradScaler("cpu", enabled=False)
        for _ in range(2):
            for batch in loader(*rank_and_num_ranks()):
                inputs = [part.to(BF16 if self.is_half else FP32) for part in batch]
                optimizer.zero_grad()
                with torch.autocast("cpu", self.autocast or BF16, enabled=bool(self.autocast)):
                    loss = model.training_step(inputs, 0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        state = model.state_dict()
        weights = {name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in state.items()}
        return model.losses, weights


WRAPPED = {"wrap": ["Shifted"]}
IN_BF16 = MixedPrecisionPolicy(BF16, FP32, cast_forward_inputs=False)
IN_FP16 = MixedPrecisionPolicy(FP16, FP32, cast_forward_inputs=False)
REDUCED = MixedPrecisionPolicy(None, BF16)
EACH: dict[str, tuple[type[Recording], dict[str, Any], dict[str, Any], ByHand]] = {
    "blocks in bf16": (
        Finite,
        WRAPPED | {"param_dtype": "bf16"},
        {},
        ByHand(MixedPrecisionPolicy(BF16, FP32, FP32), MixedPrecisionPolicy(None, FP32)),
    ),
    "gradients in bf16": (
        Finite,
        WRAPPED | {"reduce_dtype": "bf16"},
        {},
        ByHand(REDUCED, REDUCED),
    ),
    "gathered in float32 under autocast": (
        Finite,
        WRAPPED | {"param_dtype": "fp32"},
        {"precision": "bf16-mixed"},
        ByHand(autocast=BF16),
    ),
    "bf16-mixed": (
        Finite,
        WRAPPED,
        {"precision": "bf16-mixed"},
        ByHand(IN_BF16, IN_BF16, BF16),
    ),
    "bf16-true": (Finite, WRAPPED, {"precision": "bf16-true"}, ByHand(is_half=True)),
    "16-mixed, with an overflow": (
        Blocks,
        WRAPPED,
        {"16-mixed": True},
        ByHand(IN_FP16, IN_FP16, FP16, is_scaled=True),
    ),
}


def _both(case: str) -> tuple[Outcome, Outcome]:
    kind, options, settings, by_hand = EACH[case]
    return _fit(kind, options, settings), by_hand.train(kind)


def refused(param_dtype: Any, **trainer: Any) -> Case:
    strategy = TunedFSDPStrategy(param_dtype=param_dtype)
    return case_of(Finite, batch=dense_batch, strategy=strategy, trainer=trainer)


REFUSED: dict[str, Case] = {
    "all parameters are of that": refused("bf16", precision="bf16-true"),
    "gradients of 16 bits need loss scaling": refused("fp16"),
    "autocast computes in bfloat16": refused("fp16", precision="bf16-mixed"),
}


def test_types_are_those_of_a_loop_by_hand_and_not_those_of_float32() -> None:
    first, second = run_each_on_ranks({case: (_both, case) for case in EACH}, 2)
    for case in EACH:
        for distrec, per_hand in (first[case], second[case]):
            assert distrec[0] == pytest.approx(per_hand[0], rel=1e-6), case
        (_, weights), (_, expected) = first[case]
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, atol=1e-6, rtol=1e-6, msg=name)
    # Under bf16-mixed, autocast rounds what was gathered in float32 to the same numbers.
    losses = {first[case][0][0][-1] for case in EACH}
    assert len(losses) == len(EACH) - 1, "every other option changes the numbers"


@pytest.mark.parametrize("message", REFUSED)
def test_types_that_contradict_the_precision_are_refused(message: str) -> None:
    for error in check_refused(REFUSED[message], message):
        assert "param_dtype='" in error
