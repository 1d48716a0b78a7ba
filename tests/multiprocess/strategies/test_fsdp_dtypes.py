"""Types of `fsdp_tuned` against hand-written loops over fully_shard."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional

from lightning_distrec import TunedFSDPStrategy
from lightning_distrec.errors import ConfigError
from tests.support.cases import Case, case_of, check_refused
from tests.support.dense_models import WIDTH, Recording, dense_batch, loader
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS

SMALL = {"min_num_parameters": 8}
BF16, FP32, FP16 = torch.bfloat16, torch.float32, torch.float16
OVERFLOWS = {2: 1}
"""Step -> the rank whose gradients are not finite in it."""

Outcome = tuple[list[float], dict[str, Tensor]]


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


def _fit(kind: type[Recording], options: dict[str, Any], **settings: Any) -> Outcome:
    pl.seed_everything(5)
    if settings.pop("scaled", False):
        settings["plugins"] = MixedPrecision("16-mixed", "cpu", _scaler())
    rank, num_ranks = rank_and_num_ranks()
    model = kind()
    trainer = pl.Trainer(
        strategy=TunedFSDPStrategy(**options),
        devices=num_ranks,
        **DEFAULTS | {"max_epochs": 2} | settings,
    )
    validates = loader(rank, num_ranks) if "limit_val_batches" in settings else None
    trainer.fit(model, loader(rank, num_ranks), validates)
    whole = {name: value.clone() for name, value in trainer.strategy.full_state_dict().items()}
    return model.losses, whole | {
        "scale": torch.tensor(getattr(trainer.precision_plugin, "scaler", None) is not None)
    }


def _by_hand(
    kind: type[Recording],
    block_values: MixedPrecisionPolicy,
    root_values: MixedPrecisionPolicy,
    autocast: torch.dtype | None = None,
    scaled: bool = False,
) -> Outcome:
    pl.seed_everything(5)
    model: Any = kind()
    for block in (model.low, model.high):
        fully_shard(block, mp_policy=block_values)
    fully_shard(model, mp_policy=root_values)
    optimizer = model.configure_optimizers()
    scaler = _scaler() if scaled else torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(2):
        for batch in loader(*rank_and_num_ranks()):
            optimizer.zero_grad()
            with torch.autocast("cpu", autocast or BF16, enabled=autocast is not None):
                outputs = model(batch[0])
                loss = functional.mse_loss(outputs, batch[1])
            model.losses.append(float(loss.detach()))
            is_bad = (
                kind is Blocks and OVERFLOWS.get(len(model.losses) - 1) == rank_and_num_ranks()[0]
            )
            scaler.scale(loss * torch.inf if is_bad else loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return model.losses, {
        name: getattr(v, "full_tensor", lambda v=v: v)() for name, v in model.state_dict().items()
    }


WRAPPED = {"wrap": ["Shifted"]}
EACH: dict[str, tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]] = {
    "blocks in bf16": (
        (Finite, WRAPPED | {"param_dtype": "bf16"}),
        {},
        (Finite, MixedPrecisionPolicy(BF16, FP32, FP32), MixedPrecisionPolicy(None, FP32)),
    ),
    "gradients in bf16": (
        (Finite, WRAPPED | {"reduce_dtype": "bf16"}),
        {},
        (Finite, MixedPrecisionPolicy(None, BF16), MixedPrecisionPolicy(None, BF16)),
    ),
    "gathered in float32 under autocast": (
        (Finite, WRAPPED | {"param_dtype": "fp32"}),
        {"precision": "bf16-mixed"},
        (Finite, MixedPrecisionPolicy(), MixedPrecisionPolicy(), BF16),
    ),
    "16-mixed, with an overflow": (
        (Blocks, WRAPPED),
        {"scaled": True},
        (Blocks, *2 * [MixedPrecisionPolicy(FP16, FP32, cast_forward_inputs=False)], FP16, True),
    ),
}


def _both(case: str) -> tuple[Outcome, Outcome]:
    (args, settings, per_hand) = EACH[case]
    return _fit(*args, **settings), _by_hand(*per_hand)


def refused(param_dtype: Any, **trainer: Any) -> Case:
    strategy = TunedFSDPStrategy(param_dtype=param_dtype)
    return case_of(Finite, batch=dense_batch, strategy=strategy, trainer=trainer)


REFUSED: dict[str, Case] = {
    "all parameters are of that": refused("bf16", precision="bf16-true"),
    "gradients of 16 bits need loss scaling": refused("fp16"),
    "autocast computes in bfloat16": refused("fp16", precision="bf16-mixed"),
}


@pytest.fixture(scope="module")
def actual() -> list[dict[str, Any]]:
    return run_each_on_ranks({case: (_both, case) for case in EACH}, 2)


@pytest.mark.parametrize("case", EACH)
def test_types_are_those_of_a_loop_by_hand(actual: list[dict[str, Any]], case: str) -> None:
    for rank_result in actual:
        distrec, per_hand = rank_result[case]
        assert distrec[0] == pytest.approx(per_hand[0], rel=1e-6)
    distrec, per_hand = actual[0][case]
    for name, value in per_hand[1].items():
        torch.testing.assert_close(distrec[1][name], value, atol=1e-6, rtol=1e-6, msg=name)


def test_types_are_not_those_of_float32(actual: list[dict[str, Any]]) -> None:
    exact = {case: actual[0][case][0][0][-1] for case in EACH}
    assert len(set(exact.values())) == len(EACH), "every option changes the numbers"


@pytest.mark.parametrize("message", REFUSED)
def test_types_that_contradict_the_precision_are_refused(message: str) -> None:
    for error in check_refused(REFUSED[message], message):
        assert "param_dtype='" in error


def test_a_type_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="param_dtype='float16' is not known.* Use one of 'fp32', 'bf16', 'fp16'"
    ):
        TunedFSDPStrategy(param_dtype="float16")  # type: ignore[arg-type]
