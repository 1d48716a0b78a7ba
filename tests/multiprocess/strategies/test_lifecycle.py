"""fit, validate, test and predict in any order and repeatedly, as a Trainer's user would call
them."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_distrec._compat.fbgemm import fbgemm_kernels
from tests.support.click_model import (
    FEATURES,
    ClickModel,
    EvaluatedModel,
    SequenceModel,
    join_batches,
    largest_difference,
    make_batch,
    rank_loader,
    seeded,
    train_sharded,
    train_unsharded,
)
from tests.support.embedding_models import whole_state
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer


def _losses(model: ClickModel, steps: range) -> list[float]:
    losses = []
    for step in steps:
        batch = join_batches([make_batch(1000 * step + rank) for rank in range(2)])
        with torch.no_grad():
            losses.append(
                float(nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"]))
            )
    return losses


def _every_order() -> dict[str, Any]:
    rank, _ = rank_and_num_ranks()
    model = seeded(EvaluatedModel, torch.optim.Adagrad, {"lr": 0.1})
    trainer = make_trainer()
    actual: dict[str, Any] = {}
    actual["before"] = trainer.validate(model, rank_loader(4, rank), verbose=False)[0]["val_loss"]
    actual["predicted"] = torch.cat(trainer.predict(model, rank_loader(1, rank)))
    trainer.fit(model, rank_loader(10, rank), rank_loader(4, rank))
    actual["first fit"] = model.final_state
    actual["test"] = trainer.test(model, rank_loader(4, rank), verbose=False)[0]["val_loss"]
    second = make_trainer(num_sanity_val_steps=2)
    second.fit(model, rank_loader(10, rank, first=10), rank_loader(4, rank))
    actual["second fit"] = model.final_state
    loaders = [rank_loader(4, rank), rank_loader(2, rank, first=4)]
    actual["two loaders"] = second.validate(model, loaders, verbose=False)
    return actual


def test_fit_validate_test_and_predict_work_in_any_order_and_twice() -> None:
    actual = run_on_warm_ranks(_every_order, 2)
    start = seeded(EvaluatedModel, torch.optim.Adagrad, {"lr": 0.1})
    assert actual[0]["before"] == pytest.approx(sum(_losses(start, range(4))) / 4, abs=1e-6)
    for rank in range(2):
        torch.testing.assert_close(
            actual[rank]["predicted"], start(make_batch(rank)).detach(), atol=1e-6, rtol=0
        )
    first = train_unsharded(start, 10, 2)
    assert max(largest_difference(actual[0]["first fit"], first.final_state).values()) <= 1e-5
    assert actual[0]["test"] == pytest.approx(sum(_losses(first, range(4))) / 4, abs=1e-5)
    # A second fit calls configure_optimizers again: weights go on, Adagrad's sums start anew, as
    # always in Lightning.
    optimizer = first.configure_optimizers()
    for step in range(10, 20):
        optimizer.zero_grad()
        first.training_step(
            join_batches([make_batch(1000 * step + r) for r in range(2)]), step
        ).backward()
        optimizer.step()
    assert max(largest_difference(actual[0]["second fit"], first.state_dict()).values()) <= 1e-5
    two = actual[0]["two loaders"]
    assert two[0]["val_loss/dataloader_idx_0"] == pytest.approx(
        sum(_losses(first, range(4))) / 4, abs=1e-5
    )
    assert two[1]["val_loss/dataloader_idx_1"] == pytest.approx(
        sum(_losses(first, range(4, 6))) / 2, abs=1e-5
    )


class ManualModel(ClickModel):
    """Two optimizers, stepped by the module: one for the tables, one for the rest."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [
            self.optimizer(self.ebc.parameters(), **self.options),
            torch.optim.Adam(self.mlp.parameters(), lr=0.01),
        ]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        tables, dense = self.optimizers()
        # Two backward passes into one step: what an update inside of backward could not do.
        for scale in (1.0, 0.5):
            loss = scale * nn.functional.binary_cross_entropy_with_logits(
                self(batch), batch["label"]
            )
            self.manual_backward(loss)
        for optimizer in (tables, dense):
            optimizer.step()
            optimizer.zero_grad()


def _manual() -> tuple[dict[str, Tensor], set[str]]:
    model = seeded(ManualModel, torch.optim.Adagrad, {"lr": 0.1})
    model, trainer = train_sharded(model, 10)
    return model.final_state, trainer.global_step


def test_manual_optimization_with_two_optimizers_equals_unsharded() -> None:
    actual, steps = run_on_warm_ranks(_manual, 2)[0]
    model = seeded(ManualModel, torch.optim.Adagrad, {"lr": 0.1})
    tables, dense = model.configure_optimizers()
    for step in range(10):
        batch = join_batches([make_batch(1000 * step + rank) for rank in range(2)])
        for scale in (1.0, 0.5):
            (
                scale * nn.functional.binary_cross_entropy_with_logits(model(batch), batch["label"])
            ).backward()
        for optimizer in (tables, dense):
            optimizer.step()
            optimizer.zero_grad()
    assert max(largest_difference(actual, model.state_dict()).values()) <= 1e-5
    assert steps == 20


def _bf16() -> dict[str, Tensor]:
    model = seeded(ClickModel, torch.optim.SGD, {"lr": 1.0})
    return train_sharded(model, 10, precision="bf16-mixed")[0].final_state


def test_bf16_mixed_is_no_further_from_float32_than_the_unsharded_run_in_bf16() -> None:
    actual = run_on_warm_ranks(_bf16, 2)[0]
    start = seeded(ClickModel, torch.optim.SGD, {"lr": 1.0})
    exact = train_unsharded(start, 10, 2).final_state
    rounded = train_unsharded(
        start, 10, 2, lambda: torch.autocast("cpu", torch.bfloat16)
    ).final_state

    def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
        return sum(float((a[key] - b[key]).pow(2).sum()) for key in a) ** 0.5

    assert 0 < distance(rounded, exact) < 0.5 * distance(start.state_dict(), exact)
    assert 0 < distance(actual, exact) < 1.5 * distance(rounded, exact)


def _evaluation_counters() -> list[int]:
    rank, _ = rank_and_num_ranks()
    model = seeded(EvaluatedModel, RowWiseAdagrad, {"lr": 0.1})
    counters: list[int] = []

    def count() -> None:
        kernels = fbgemm_kernels(model.trainer.strategy.run_tables.shards.sharded["ebc"])
        counters.append(int(kernels[0].iter) if kernels else -1)

    model.on_validation_start = count  # type: ignore[method-assign]
    model.on_validation_end = count  # type: ignore[method-assign]
    make_trainer({"prefetch": {"depth": 1}}, max_epochs=2).fit(
        model, rank_loader(5, rank), rank_loader(3, rank)
    )
    return counters


def test_evaluation_leaves_the_optimizers_step_counters_alone() -> None:
    for counters in run_on_warm_ranks(_evaluation_counters, 2):
        assert counters == [5, 5, 10, 10]


class TypedModel(EvaluatedModel):
    """Uses what the tables return in the ways of the unsharded types."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        rows = self.ebc(features)
        assert isinstance(rows, KeyedTensor)
        assert rows.keys() == ["a", "b@wide", "c", "b@shared", "d"]
        assert len(rows.to_dict()) == 5
        torch.testing.assert_close(
            torch.cat(list(rows.to_dict().values()), 1), rows.values(), atol=0, rtol=0
        )
        assert type(rows) is KeyedTensor  # once its values are here
        return self.mlp(rows.values()).squeeze(-1)


class TypedSequences(SequenceModel):
    """The same over an EmbeddingCollection."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        rows = self.ebc(features)
        assert type(rows) is dict
        assert list(rows) == FEATURES
        assert len(rows["a"].values()) == int(batch["lengths"][:8].sum())
        return super().forward(batch)


def _typed() -> None:
    cuts = {"wide": "row_wise", "narrow": "table_wise", "shared": "column_wise"}
    tables = {name: {"sharding_types": [cut], "min_partition": 4} for name, cut in cuts.items()}
    train_sharded(seeded(TypedModel, torch.optim.SGD, {"lr": 0.1}), 2, {"tables": tables})
    cuts = {"wide": "row_wise", "narrow": "table_wise"}
    tables = {name: {"sharding_types": [cut]} for name, cut in cuts.items()}
    train_sharded(seeded(TypedSequences, torch.optim.SGD, {"lr": 0.1}), 2, {"tables": tables})


def test_outputs_have_the_real_types_keys_and_column_order() -> None:
    run_on_warm_ranks(_typed, 2)


class ReorderedModel(ClickModel):
    """Names the features in another order on odd steps, and sometimes one too many."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.order = ["a", "b", "c", "d"] if batch_idx % 2 == 0 else ["d", "b", "a", "c"]
        return super().training_step(batch, batch_idx)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        features = features.permute([FEATURES.index(name) for name in self.order])
        return self.mlp(self.ebc(features).values()).squeeze(-1)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.order = ["c", "d", "b", "a"]
        return self(batch)


def _reordered() -> tuple[dict[str, Tensor], Tensor]:
    model, _ = train_sharded(seeded(ReorderedModel, torch.optim.SGD, {"lr": 1.0}), 10)
    # Another trainer, another order: torchrec still remembers the one of the first call.
    return model.final_state, make_trainer().predict(
        model, rank_loader(1, rank_and_num_ranks()[0])
    )[0]


def test_features_may_come_in_another_order_at_every_call() -> None:
    actual, predicted = run_on_warm_ranks(_reordered, 2)[0]
    reference = train_unsharded(seeded(ReorderedModel, torch.optim.SGD, {"lr": 1.0}), 10, 2)
    assert max(largest_difference(actual, reference.final_state).values()) <= 1e-6
    torch.testing.assert_close(predicted, reference(make_batch(0)).detach(), atol=1e-5, rtol=0)


class NestedModel(pl.LightningModule):
    """Collections at several depths, one of them used under two names, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()

        def collection(name: str, rows: int) -> EmbeddingBagCollection:
            config = EmbeddingBagConfig(
                name=name, embedding_dim=8, num_embeddings=rows, feature_names=["a"]
            )
            return EmbeddingBagCollection(tables=[config])

        self.towers = nn.ModuleDict({
            "left": nn.ModuleList([collection("t", 60)]),
            "right": collection("t", 61),
        })
        self.alias = self.towers["right"]
        self.still = collection("still", 60).requires_grad_(False)
        self.top = nn.Linear(32, 1)
        self.final_state: dict[str, Tensor] = {}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        towers = [self.towers["left"][0], self.towers["right"], self.alias, self.still]
        joined = torch.cat([tower(features).values() for tower in towers], 1)
        return nn.functional.binary_cross_entropy_with_logits(
            self.top(joined).squeeze(-1), batch["label"]
        )

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": self.towers.parameters(), "lr": 2.0},
            {"params": [*self.top.parameters(), *self.still.parameters()]},
        ]
        return torch.optim.SGD(groups, lr=0.5)

    def on_train_end(self) -> None:
        self.final_state = whole_state(self)


def _nested() -> tuple[dict[str, Tensor], dict[str, str]]:
    rank, _ = rank_and_num_ranks()
    model = seeded(NestedModel)
    kinds: dict[str, str] = {}

    def look() -> None:
        setup = model.trainer.strategy.run_tables
        kinds.update({name: update.kind for name, update in setup.updates.items()})

    model.on_train_start = look  # type: ignore[method-assign]
    make_trainer().fit(model, rank_loader(10, rank))
    return model.final_state, kinds


def test_nested_shared_and_frozen_collections_and_param_groups_equal_unsharded() -> None:
    actual, kinds = run_on_warm_ranks(_nested, 2)[0]
    model = seeded(NestedModel)
    optimizer = model.configure_optimizers()
    for step in range(10):
        optimizer.zero_grad()
        model.training_step(
            join_batches([make_batch(1000 * step + rank) for rank in range(2)]), step
        ).backward()
        optimizer.step()
    assert kinds == {"towers.left.0.t": "fused", "towers.right.t": "fused", "still.still": "frozen"}
    assert max(largest_difference(actual, model.state_dict()).values()) <= 1e-6


def _plain_ddp() -> list[float]:
    rank, _ = rank_and_num_ranks()
    torch.manual_seed(1)
    model = PlainModel()
    make_trainer().fit(
        model,
        DataLoader([torch.full((4, 2), float(rank + step)) for step in range(5)], batch_size=None),
    )
    return model.weight.detach().flatten().tolist()


class PlainModel(pl.LightningModule):
    """A module without tables."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (batch @ self.weight).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_a_module_without_tables_trains_as_under_ddp() -> None:
    actual = run_on_warm_ranks(_plain_ddp, 2)
    weight = torch.ones(2, requires_grad=True)
    for step in range(5):
        loss = (
            sum(
                (torch.full((4, 2), float(rank + step)) @ weight).pow(2).mean() for rank in range(2)
            )
            / 2
        )
        (gradient,) = torch.autograd.grad(loss, weight)
        weight = (weight - 0.01 * gradient).detach().requires_grad_()
    assert actual[0] == actual[1] == pytest.approx(weight.tolist(), abs=1e-6)
