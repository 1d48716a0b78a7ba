"""Precisions and loss scaling over sharded tables: the numbers of an unsharded run in the same
arithmetic."""

from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from io import StringIO
from itertools import product
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.modules.embedding_configs import DataType

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
from tests.support.parameters import slow_except
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS

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
    """Meets a loss that is too large in some steps, on one rank only."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        bad_rank = OVERFLOWS.get(batch_idx)
        return (
            loss * torch.inf
            if bad_rank is not None and rank_and_num_ranks()[0] == bad_rank
            else loss
        )


class OverflowsInOneTable(ClickModel):
    """Meets a gradient that is not finite in one row of one table only, which one rank holds."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        if OVERFLOWS.get(batch_idx) == rank_and_num_ranks()[0]:
            return (
                super().training_step(batch, batch_idx)
                + (self.ebc(features).values()[:, :1] * torch.inf).sum()
            )
        return (
            super().training_step(batch, batch_idx) + 0.0 * self.ebc(features).values()[:, :1].sum()
        )


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


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)


def _train(kind: type, optimizer: Any, strategy: dict[str, Any], options: dict[str, Any]) -> Any:
    if options.pop("scaled", False):
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", _scaler())]
    out = StringIO()
    with redirect_stdout(out):
        model, trainer = train_sharded(seeded(kind, *optimizer), STEPS, strategy, **options)
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return model.final_state, None if scaler is None else scaler.get_scale(), out.getvalue()


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
    slow_except(
        [("bf16-true", ADAGRAD), ("16-true", ADAM), ("bf16-mixed", SGD)],
        product(DTYPES, [SGD, ADAGRAD, ADAM]),
    ),
)
def test_half_precisions_keep_tables_in_float32(precision: str, optimizer: Any) -> None:
    dtype = DTYPES[precision]
    actual, _, printed = run_on_warm_ranks(
        _train, 2, Typed, optimizer, {}, {"precision": precision}
    )[0]
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


@pytest.mark.parametrize("kind", [SequenceModel, ClickModel])
def test_a_half_precision_reaches_rows_of_both_collections(kind: type) -> None:
    actual = run_on_warm_ranks(_type_of_rows, 2, kind)
    assert actual == [torch.bfloat16, torch.bfloat16]


def _type_of_rows(kind: type) -> torch.dtype:
    types: list[torch.dtype] = []

    class Looks(kind):  # type: ignore[misc]
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            features = KeyedJaggedTensor(
                keys=FEATURES, values=batch["ids"], lengths=batch["lengths"]
            )
            rows = self.ebc(features)
            values = rows["a"].values() if isinstance(self.ebc, EmbeddingCollection) else rows["a"]
            types.append(values.dtype)
            return (
                self.mlp[1](values).sum().expand(len(batch["label"]))
                + 0.0 * self.mlp[0].weight.sum()
            )

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self(batch).mean()

    train_sharded(seeded(Looks, *SGD), 1, {"find_unused_parameters": True}, precision="bf16-true")
    return types[0]


@pytest.mark.parametrize(
    ("kind", "optimizer", "cut"),
    slow_except(
        [
            (Overflows, ADAGRAD, "table_wise"),
            (Overflows, ADAM, "row_wise"),
            (OverflowsInOneTable, SGD, "row_wise"),
            (OverflowsInOneTable, ADAM, "table_wise"),
        ],
        product([Overflows, OverflowsInOneTable], [SGD, ADAGRAD, ADAM], ["table_wise", "row_wise"]),
    ),
)
def test_steps_with_gradients_that_are_not_finite_are_skipped_on_all_ranks(
    kind: type, optimizer: Any, cut: str
) -> None:
    options = {"scaled": True}
    results = run_on_warm_ranks(_train, 2, kind, optimizer, {"sharding_types": [cut]}, options)
    model = seeded(ClickModel, *optimizer)
    stepper, scaler = model.configure_optimizers(), _scaler()
    for step in range(STEPS):
        stepper.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model.training_step(_global_batch(step), step)
        scaler.scale(loss * (torch.inf if step in OVERFLOWS else 1.0)).backward()
        scaler.step(stepper)
        scaler.update()
    assert [scale for _, scale, _ in results] == [scaler.get_scale()] * 2
    actual = results[0][0]
    assert _too_far(actual, model.state_dict()) <= 1e-4
    assert all(bool(value.isfinite().all()) for value in actual.values())


def _clipped_and_scaled() -> dict[str, Tensor]:
    plugins = [MixedPrecision("16-mixed", "cpu", _scaler())]
    model = seeded(ClickModel, *ADAGRAD)
    return train_sharded(
        model, STEPS, plugins=plugins, gradient_clip_val=0.05, accumulate_grad_batches=2
    )[0].final_state


def test_scaling_clipping_and_accumulating_together() -> None:
    actual = run_on_warm_ranks(_clipped_and_scaled, 2)[0]
    model = seeded(ClickModel, *ADAGRAD)
    stepper, scaler = model.configure_optimizers(), _scaler()
    for step in range(STEPS):
        with torch.autocast("cpu", torch.float16):
            loss = model.training_step(_global_batch(step), step) / 2
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(stepper)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            scaler.step(stepper)
            scaler.update()
            stepper.zero_grad()
    assert _too_far(actual, model.state_dict()) <= 1e-4


FLOAT16: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fused": ({}, {}),
    "dense": ({"embedding_update": "dense"}, {}),
    "accumulated": ({}, {"accumulate_grad_batches": 2}),
    "clipped": ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
}


@pytest.mark.parametrize("name", FLOAT16)
def test_float16_tables_train_with_every_update(name: str) -> None:
    optimizer = (torch.optim.SGD, {"lr": 1.0})
    strategy, options = FLOAT16[name]
    actual, _, printed = run_on_warm_ranks(
        _train, 2, HalfTables, optimizer, strategy, dict(options)
    )[0]
    assert all(actual[key].dtype == torch.float16 for key in actual if "ebc" in key)
    assert "float16" in printed
    expected = seeded(HalfTables, *optimizer)
    trainer = pl.Trainer(strategy="auto", devices=1, **(DEFAULTS | options))
    trainer.fit(expected, DataLoader([_global_batch(step) for step in range(STEPS)], None))
    state = expected.state_dict()
    assert _too_far(actual, {key: value.float() for key, value in state.items()}) <= 1e-3
    start = seeded(HalfTables, *optimizer).state_dict()
    assert min(float((state[key] - start[key]).abs().max()) for key in state) > 1e-3


def test_sparse_gradients_of_float16_tables_are_refused_on_a_cpu() -> None:
    with pytest.raises(
        Exception,
        match="adds up no sparse gradients in half precision on a CPU. Set embedding_update",
    ):
        run_on_warm_ranks(_train, 2, HalfTables, SGD, {"embedding_update": "sparse"}, {})
