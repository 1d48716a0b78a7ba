"""Precisions and loss scaling over sharded tables: the numbers of an unsharded run in the same
arithmetic."""

from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

from tests.support.cases import Case, check, click_case, run_case
from tests.support.click_model import (
    FEATURES,
    ClickModel,
    SequenceModel,
    bag_configs,
    join_batches,
    largest_difference,
    make_batch,
    seeded,
    train_sharded,
)
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks

SGD = (torch.optim.SGD, {"lr": 0.1})
# An eps that keeps the rounding of gradients near 0 from becoming steps of the full rate.
ADAGRAD = (torch.optim.Adagrad, {"lr": 0.02, "eps": 1e-2})
ADAM = (torch.optim.Adam, {"lr": 0.001, "eps": 1e-3})
STEPS = 8
OVERFLOWS = {2: 1, 5: 0}
"""Step -> the rank whose gradients are not finite in it."""


class Typed(ClickModel):
    """Computes in the type of its dense layers, as an ordinary module under a half precision
    does."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        looked_up = self.ebc(features).values()
        # the unsharded tables stay float32; sharded ones come back in the right type
        if self._trainer is None:
            looked_up = looked_up.to(self.mlp[0].weight.dtype)
        return self.mlp(looked_up).squeeze(-1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.binary_cross_entropy_with_logits(
            self(batch).float(), batch["label"].float()
        )
        self.losses.append(float(loss.detach()))
        return loss


class Overflows(ClickModel):
    """Meets a loss that is too large in some steps, on one rank only; in_row: a gradient in one row
    of one table only. everywhere: in one process, which has the batches of all ranks."""

    def __init__(self, *args: Any, in_row: bool = False, everywhere: bool = False) -> None:
        super().__init__(*args)
        self.in_row, self.everywhere = in_row, everywhere

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        overflows = batch_idx in OVERFLOWS
        if not self.everywhere:
            overflows = OVERFLOWS.get(batch_idx) == rank_and_num_ranks()[0]
        if self.in_row:
            features = KeyedJaggedTensor(FEATURES, batch["ids"], lengths=batch["lengths"])
            column = self.ebc(features).values()[:, :1]
            return loss + ((column * torch.inf).sum() if overflows else 0.0 * column.sum())
        return loss * torch.inf if overflows else loss


class HalfTables(ClickModel):
    """Its tables are float16."""

    def _build(self) -> None:
        configs = bag_configs()
        for config in configs:
            config.data_type = DataType.FP16
        self.ebc = EmbeddingBagCollection(tables=configs)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        return self.mlp(self.ebc(features).values().float()).squeeze(-1)


def scale(trainer: Any) -> float:
    return trainer.precision_plugin.scaler.get_scale()


def _train(kind: type, optimizer: Any, strategy: dict[str, Any], options: dict[str, Any]) -> Any:
    out = StringIO()
    with redirect_stdout(out):
        model, _ = train_sharded(seeded(kind, *optimizer), STEPS, strategy, **options)
    return model.final_state, out.getvalue()


def _global_batch(step: int) -> dict[str, Tensor]:
    return join_batches([make_batch(1000 * step + rank) for rank in range(2)])


def _plain(
    kind: type, optimizer: Any, context: Any = nullcontext, convert: torch.dtype | None = None
) -> Any:
    model = seeded(kind, *optimizer)
    if convert is not None:
        model.mlp.to(convert)
    stepper = model.configure_optimizers()
    for step in range(STEPS):
        stepper.zero_grad()
        entered: AbstractContextManager[Any] = context()
        with entered:
            loss = model.training_step(_global_batch(step), step)
        loss.backward()
        stepper.step()
    return model.state_dict()


DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "bf16-mixed": None}


def _too_far(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    return max(largest_difference({k: v.float() for k, v in actual.items()}, expected).values())


@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [("bf16-true", ADAGRAD), ("16-true", ADAM), ("bf16-mixed", SGD)],
)
def test_half_precisions_keep_tables_in_float32(precision: str, optimizer: Any) -> None:
    dtype = DTYPES[precision]
    actual, printed = run_on_warm_ranks(_train, 2, Typed, optimizer, {}, {"precision": precision})[
        0
    ]
    for key, value in actual.items():
        assert value.dtype == (torch.float32 if "ebc" in key or dtype is None else dtype)
    if dtype is None:
        expected = _plain(Typed, optimizer, lambda: torch.autocast("cpu", torch.bfloat16))
    else:
        expected = _plain(Typed, optimizer, convert=dtype)
        assert (
            f"rows are float32 and are looked up as {str(dtype).removeprefix('torch.')}" in printed
        )
    assert _too_far(actual, {key: value.float() for key, value in expected.items()}) <= 1e-3
    start = seeded(Typed, *optimizer).state_dict()
    assert min(float((expected[key] - start[key]).abs().max()) for key in expected) > 5e-4


def type_of_rows(trainer: Any) -> torch.dtype:
    return trainer.lightning_module.types[-1]


class Looks(SequenceModel):
    """Keeps the type of the rows that it looks up."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        rows = self.ebc(features)["a"].values()
        self.types = [rows.dtype]
        return rows.float().sum() + 0.0 * self.mlp(self.first(rows.new_zeros(1, 32))).sum()


def test_a_half_precision_reaches_rows_of_sequences() -> None:
    case = click_case(Looks, steps=1, trainer={"precision": "bf16-true"}, look=type_of_rows)
    assert [outcome.seen for outcome in run_case(case)] == [torch.bfloat16] * 2


def overflowing(optimizer: Any, cut: str, in_row: bool) -> Case:
    whole = partial(Overflows, *optimizer, in_row=in_row, everywhere=True)
    return click_case(
        Overflows,
        optimizer,
        in_row=in_row,
        plain=whole,
        strategy={"sharding_types": [cut]},
        trainer=SCALED,
        **ROUNDED,
    )


def halves(trainer: dict[str, Any], **strategy: Any) -> Case:
    optimizer = (torch.optim.SGD, {"lr": 1.0})
    fields = {"limit": 1e-3, "loss_limit": 1e-3, "told": ("float16",), "steps": STEPS}
    return click_case(HalfTables, optimizer, strategy=strategy, trainer=trainer, **fields)


SCALER = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
SCALED = {"plugins": [MixedPrecision("16-mixed", "cpu", SCALER)]}
ROUNDED: dict[str, Any] = {"limit": 1e-4, "loss_limit": None, "steps": STEPS, "look": scale}
CLIPPED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
CASES = {
    "overflow, Adam": overflowing(ADAM, "row_wise", False),
    "overflow in a row": overflowing(SGD, "row_wise", True),
    "scaled, clipped and accumulated": click_case(
        ClickModel, ADAGRAD, trainer=SCALED | CLIPPED, **ROUNDED
    ),
    "float16 tables": halves({}),
    "float16 tables, clipped": halves(CLIPPED),
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_of_16_bits_train_as_in_one_process(name: str) -> None:
    outcomes = check(CASES[name])
    assert len({outcome.seen for outcome in outcomes}) == 1, "ranks scale alike"
