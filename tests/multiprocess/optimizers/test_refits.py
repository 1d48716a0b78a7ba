"""Optimizers that outlive a fit, gradient code that is not the Trainer's, and what a review
found."""

import gc
import weakref
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.utils.checkpoint
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_distrec import gpu
from lightning_distrec.sharding.shard_tables import TableSharding
from tests.support.click_model import (
    FEATURES,
    ClickModel,
    SequenceModel,
    join_batches,
    largest_difference,
    make_batch,
    seeded,
    train_sharded,
    train_unsharded,
)
from tests.support.plain_loop import global_batches, train_plain
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_on_warm_ranks

SGD = (torch.optim.SGD, {"lr": 1.0})
ADAM = (torch.optim.Adam, {"lr": 0.001})
ADAGRAD = (torch.optim.Adagrad, {"lr": 0.02})
STEPS = 5


class KeepsItsOptimizer(ClickModel):
    """Makes its optimizer once."""

    kept_optimizer: Any = None

    def configure_optimizers(self) -> Any:
        if self.kept_optimizer is None:
            self.kept_optimizer = super().configure_optimizers()
        return self.kept_optimizer


class LoadsState(ClickModel):
    """Restores an optimizer state of its own."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer


class HooksLate(ClickModel):
    """Registers gradient hooks once training has begun."""

    def on_train_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5)


class ClipsTables(ClickModel):
    """Clips the tables' gradients by itself."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.ebc.parameters(), 0.01)


class NotWeighted(ClickModel):
    """Forgets the weights of a weighted collection."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.weighted = False
        return super().forward(batch)


class ChecksAgain(ClickModel):
    """Recomputes its lookup in backward, by the older kind of checkpoint."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        anchor = torch.zeros(1, requires_grad=True)
        return torch.utils.checkpoint.checkpoint(
            lambda _: super(ChecksAgain, self).forward(batch), anchor, use_reentrant=True
        )


class UnfreezesInTheStep(ClickModel):
    """Unfreezes its tables inside of a step."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.ebc.requires_grad_(True)
        return super().training_step(batch, batch_idx)


def _fits(
    kind: type, optimizer: Any, fits: int, options: dict[str, Any] | None = None
) -> dict[str, Tensor]:
    model = seeded(kind, *optimizer, **(options or {}))
    if kind is UnfreezesInTheStep:
        model.ebc.requires_grad_(False)
    for _ in range(fits):
        train_sharded(model, STEPS)
    return model.final_state


def _fits_of_new_modules(fits: int) -> list[bool]:
    gc.disable()  # so that only the product collects
    try:
        earlier: list[weakref.ref[ClickModel]] = []
        for _ in range(fits):
            model, trainer = train_sharded(seeded(ClickModel, *SGD), 2)
            earlier.append(weakref.ref(model))
            del model, trainer
    finally:
        gc.enable()
    return [model() is not None for model in earlier]


def test_tables_of_earlier_fits_are_gone_when_the_next_fit_shards() -> None:
    for num_left in run_on_warm_ranks(_fits_of_new_modules, 2, 4):
        assert not any(num_left[:-1]), num_left


@pytest.mark.parametrize("optimizer", [SGD, (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.05})])
def test_an_optimizer_that_outlives_a_fit_goes_on(optimizer: Any) -> None:
    actual = run_on_warm_ranks(_fits, 2, KeepsItsOptimizer, optimizer, 2)[0]
    expected = train_unsharded(
        train_unsharded(seeded(ClickModel, *optimizer), STEPS, 2), STEPS, 2
    ).final_state
    assert max(largest_difference(actual, expected).values()) <= 1e-6


@pytest.mark.parametrize(
    ("kind", "optimizer", "fits", "options", "message"),
    [
        (KeepsItsOptimizer, ADAGRAD, 2, {}, "OptimizerError: .*its Adagrad has stepped before"),
        (KeepsItsOptimizer, ADAM, 2, {}, "OptimizerError: .*its Adam has stepped before"),
        (LoadsState, ADAM, 1, {}, "OptimizerError: .*its Adam has stepped before"),
        (
            HooksLate,
            SGD,
            1,
            {},
            "OptimizerError: a gradient hook was registered on the weight of 'ebc.wide'",
        ),
        (
            ClipsTables,
            ADAM,
            1,
            {},
            "UnsupportedError: torch.nn.utils.clip_grad_norm_ was called with gradients of",
        ),
        (
            ClipsTables,
            SGD,
            1,
            {},
            "UnsupportedError: torch.nn.utils.clip_grad_norm_ was called with gradients of",
        ),
        (
            NotWeighted,
            SGD,
            1,
            {"weighted": True},
            "ShardingError: 'ebc' is weighted, and was called with ids that have",
        ),
    ],
)
def test_is_reported_on_every_rank(
    kind: type, optimizer: Any, fits: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RankFailed, match=message) as failed:
        run_on_warm_ranks(_fits, 2, kind, optimizer, fits, options)
    assert str(failed.value).count("raised:") == 2


@pytest.mark.parametrize("optimizer", [SGD, ADAGRAD, ADAM])
def test_tables_that_are_unfrozen_inside_of_a_step_learn_from_then_on(optimizer: Any) -> None:
    actual = run_on_warm_ranks(_fits, 2, UnfreezesInTheStep, optimizer, 1)[0]
    model = seeded(UnfreezesInTheStep, *optimizer)
    model.ebc.requires_grad_(False)
    expected = train_unsharded(model, STEPS, 2).final_state
    assert max(largest_difference(actual, expected).values()) <= (
        1e-6 if optimizer is SGD else 1e-5
    )


class UsesSomeRows(SequenceModel):
    """Looks all features up, and uses two of them in every second step only."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        rows = self.ebc(features)
        names = FEATURES if batch_idx % 2 == 0 else FEATURES[:2]
        loss = sum(rows[name].values().pow(2).sum() for name in names) / 8
        return loss + 0.0 * self.mlp(self.first(torch.zeros(1, 32))).sum()


@pytest.mark.parametrize("cut", ["row_wise", "table_wise"])
def test_rows_that_go_into_no_loss_leave_their_table_to_rest(cut: str) -> None:
    actual = run_on_warm_ranks(_uses_some, 2, cut)[0]
    model = seeded(UsesSomeRows, *ADAM)
    optimizer = model.configure_optimizers()
    for step in range(STEPS):
        optimizer.zero_grad()
        batches = [make_batch(1000 * step + rank) for rank in range(2)]
        (sum(model.training_step(batch, step) for batch in batches) / 2).backward()
        optimizer.step()
    assert max(largest_difference(actual, model.state_dict()).values()) <= 1e-5


def _uses_some(cut: str) -> dict[str, Tensor]:
    return train_sharded(seeded(UsesSomeRows, *ADAM), STEPS, {"sharding_types": [cut]})[
        0
    ].final_state


class Restores(ClickModel):
    """Puts its first weights back at the end, from a plain state_dict, and what it has from its
    own."""

    def on_train_start(self) -> None:
        self.first_weights = seeded(ClickModel, *SGD).state_dict()

    def on_train_end(self) -> None:
        self.load_state_dict(self.state_dict())
        self.load_state_dict(self.first_weights, strict=True)
        super().on_train_end()


@pytest.mark.parametrize("cut", ["row_wise", "table_wise", "column_wise"])
def test_a_sharded_module_loads_a_plain_state_dict(cut: str) -> None:
    actual = run_on_warm_ranks(_restored, 2, cut)[0]
    expected = seeded(ClickModel, *SGD).state_dict()
    assert all(torch.equal(actual[key], expected[key]) for key in expected)


def _restored(cut: str) -> dict[str, Tensor]:
    model = train_sharded(seeded(Restores, *SGD), STEPS, {"sharding_types": [cut]})[0]
    wrong = seeded(ClickModel, *SGD).state_dict()
    wrong["ebc.embedding_bags.wide.weight"] = torch.zeros(3, 16)
    with pytest.raises(
        RuntimeError, match=r"wide.weight: the table is \(60, 16\), but there is \(3, 16\)"
    ):
        model.load_state_dict(wrong)
    return model.final_state


def _halve_gradients(parameters: Iterable[Tensor]) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 0.5


def _scaled_by_a_lambda() -> dict[str, Tensor]:
    halving = LambdaCallback(
        on_after_backward=lambda _, module: _halve_gradients(module.parameters())
    )
    return train_sharded(seeded(ClickModel, *ADAGRAD), STEPS, callbacks=[halving])[0].final_state


def test_a_lambda_callback_reaches_the_gradients_of_tables() -> None:
    actual = run_on_warm_ranks(_scaled_by_a_lambda, 2)[0]
    expected = train_plain(seeded(ClickModel, *ADAGRAD), global_batches(STEPS), _halve_gradients)
    assert max(largest_difference(actual, expected).values()) <= 1e-5


def _unequal(kind: type, optimizer: Any, sizes: list[int]) -> dict[str, Tensor]:
    rank, _ = rank_and_num_ranks()
    batches = [make_batch(1000 * step + rank, sizes[rank]) for step in range(STEPS)]
    model = seeded(kind, *optimizer)
    model.train_dataloader = lambda: DataLoader(batches, batch_size=None)  # type: ignore[method-assign]
    if 0 in sizes:

        def training_step(batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            logits = model(batch)
            return (
                torch.nn.functional.binary_cross_entropy_with_logits(
                    logits, batch["label"], reduction="sum"
                )
                / 8
            )

        model.training_step = training_step
    train_sharded(model, None, {"loss_reduction": "rank_mean" if 0 in sizes else "mean"})
    return model.final_state


def test_a_reentrant_checkpoint_counts_examples_too() -> None:
    actual = run_on_warm_ranks(_unequal, 2, ChecksAgain, SGD, [3, 8])[0]
    batches = [
        join_batches([make_batch(1000 * step, 3), make_batch(1000 * step + 1, 8)])
        for step in range(STEPS)
    ]
    expected = train_plain(seeded(ClickModel, *SGD), batches)
    assert max(largest_difference(actual, expected).values()) <= 1e-6


@pytest.mark.parametrize("kind", [ClickModel, SequenceModel])
def test_a_rank_may_have_a_batch_of_no_examples(kind: type) -> None:
    actual = run_on_warm_ranks(_unequal, 2, kind, SGD, [0, 8])[0]
    batches = [make_batch(1000 * step + 1, 8) for step in range(STEPS)]
    # the other rank adds a loss of 0
    expected = train_plain(seeded(kind, *SGD), batches, _halve_gradients)
    assert max(largest_difference(actual, expected).values()) <= 1e-6


def _keeps_whole_rows() -> dict[str, Tensor]:
    strategy = {"sharding_types": ["table_wise"], "embedding_update": "dense"}
    return train_sharded(seeded(ClickModel, RowWiseAdagrad, {"lr": 0.1}), STEPS, strategy)[
        0
    ].final_state


def test_row_wise_adagrad_steps_on_shards_where_a_rank_has_no_rows() -> None:
    actual = run_on_warm_ranks(_keeps_whole_rows, 2)[0]
    expected = train_unsharded(
        seeded(ClickModel, RowWiseAdagrad, {"lr": 0.1}), STEPS, 2
    ).final_state
    assert max(largest_difference(actual, expected).values()) <= 1e-5


def test_a_second_fit_on_a_gpu_shards_after_the_first_ones_shards_are_freed() -> None:
    assert run_on_warm_ranks(_fit_again, 2) == [[0, 0]] * 2


def _fit_again() -> list[int]:
    """Return how many shards and states of the first fit live where the second one shards, as if on
    a GPU."""
    model = seeded(ClickModel, *ADAM)
    _, trainer = train_sharded(model, 2, {"sharding_types": ["row_wise"]})
    shards = trainer.strategy.optimizers[0].param_groups[0]["params"]
    old = [weakref.ref(p) for p in shards if hasattr(p, "place")]
    states = [
        weakref.ref(trainer.strategy.optimizers[0].state[p]["exp_avg"])
        for p in shards
        if hasattr(p, "place")
    ]
    del shards
    assert old
    assert states
    alive: list[int] = []

    shard = TableSharding.shard

    def look(sharding: TableSharding) -> Any:
        on_gpu.stop()
        alive.extend(
            sum(reference() is not None for reference in references) for references in (old, states)
        )
        return shard(sharding)

    on_gpu = patch.object(gpu, "is_on_gpu", lambda tensor: True)
    with patch.object(TableSharding, "shard", look):
        on_gpu.start()
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, DataLoader([make_batch(1)], batch_size=None))
    return alive
