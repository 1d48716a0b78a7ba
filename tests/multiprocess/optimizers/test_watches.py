"""What a fused update would silently not follow is told, and what looks alike and is fine goes
through."""

import re
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_distrec.errors import OptimizerError
from tests.support.click_model import (
    FEATURES,
    ClickModel,
    EvaluatedModel,
    LooksUpTwice,
    largest_difference,
    rank_loader,
    seeded,
    train_sharded,
    train_unsharded,
)
from tests.support.plain_loop import global_batches, train_plain
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

SGD = (torch.optim.SGD, {"lr": 1.0})
ADAGRAD = (torch.optim.Adagrad, {"lr": 0.1})
FUSED = {"embedding_update": "fused"}
ADAM = (torch.optim.Adam, {"lr": 0.001})
STEPS = 6


class LooksUpTwiceForOne(ClickModel):
    """Looks up a second time for a target that needs no gradient, and asks what modules have."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        assert not any(hasattr(module, "no_such_thing") for module in self.modules())
        sum(hasattr(module, "weight") for module in self.modules())
        target = super().forward(batch | {"ids": (batch["ids"] * 7 + 1) % 11}).detach()
        return super().forward(batch) + 0.1 * target


class Checkpoints(ClickModel):
    """Recomputes its lookup in backward."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, batch, use_reentrant=False)


class TwoNames(ClickModel):
    """Has two names for one collection."""

    def _build(self) -> None:
        super()._build()
        self.alias = self.ebc

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        return self.mlp(self.alias(features).values()).squeeze(-1)


class WithL2(ClickModel):
    """Has the tables' own weights in its loss."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.05 * sum(
            p.pow(2).sum() for p in self.ebc.parameters()
        )


class WarmsUp(ClickModel):
    """Overrides optimizer_step for a warm-up, as many do; nothing is wrong with it."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = min(1.0, (batch_idx + 1) / 4)
        optimizer.step(closure=optimizer_closure)


class AccumulatesLater(ClickModel):
    """Turns accumulation on behind the Trainer's back."""

    def on_train_start(self) -> None:
        self.trainer.accumulate_grad_batches = 2


class UnfreezesLater(ClickModel):
    """Starts with frozen tables and unfreezes them in the middle."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.ebc.requires_grad_(True)


class ReadsWeight(ClickModel):
    """Scores against a whole table."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch) + self.ebc.embedding_bags["wide"].weight[:5].sum()


def _train(
    kind: type, optimizer: Any, strategy: dict[str, Any], frozen: bool = False
) -> dict[str, Tensor]:
    model = seeded(kind, *optimizer)
    if frozen:
        model.ebc.requires_grad_(False)
    return train_sharded(model, STEPS, strategy)[0].final_state


@pytest.mark.parametrize(
    ("kind", "optimizer", "strategy", "output"),
    [
        (
            LooksUpTwice,
            ADAGRAD,
            FUSED,
            "OptimizerError: gradients came to more than one lookup of 'ebc' in a step",
        ),
        (WithL2, SGD, {}, "OptimizerError: the loss uses the weight of 'ebc."),
        (AccumulatesLater, SGD, {}, "OptimizerError: a second backward before optimizer.step"),
        (
            ReadsWeight,
            SGD,
            {},
            "ShardedWeightError: the weight of the sharded table 'ebc.wide' was read",
        ),
        (
            ReadsWeight,
            ADAM,
            {},
            "ShardedWeightError: the weight of the sharded table 'ebc.wide' was read",
        ),
    ],
)
def test_is_reported_on_every_rank(
    kind: type, optimizer: Any, strategy: dict[str, Any], output: str
) -> None:
    with pytest.raises(RankFailed) as failed:
        run_on_warm_ranks(_train, 2, kind, optimizer, strategy)
    assert len(re.findall(f"^.*{re.escape(output)}", str(failed.value), re.M)) == 2


@pytest.mark.parametrize(
    ("kind", "optimizer", "strategy"),
    [
        (LooksUpTwiceForOne, ADAGRAD, {}),
        (Checkpoints, ADAGRAD, {}),
        (TwoNames, SGD, {}),
        (LooksUpTwice, SGD, {}),
        (LooksUpTwice, ADAM, {}),
        (WithL2, ADAM, {}),
        (WithL2, SGD, {"embedding_update": "dense"}),
        (WithL2, SGD, {"embedding_update": "sparse"}),
    ],
)
def test_what_adds_up_is_exact(kind: type, optimizer: Any, strategy: dict[str, Any]) -> None:
    actual = run_on_warm_ranks(_train, 2, kind, optimizer, strategy)[0]
    start = seeded(kind, *optimizer)
    reference = train_unsharded(start, STEPS, 2).final_state
    assert max(largest_difference(actual, reference).values()) <= (
        1e-6 if optimizer is SGD else 1e-5
    )


def test_tables_that_are_unfrozen_while_training_learn_from_then_on() -> None:
    actual = run_on_warm_ranks(_train, 2, UnfreezesLater, SGD, {}, True)[0]
    model = seeded(UnfreezesLater, *SGD)
    expected = train_plain(
        model, global_batches(STEPS), before_batch=lambda step: model.ebc.requires_grad_(step >= 3)
    )
    assert max(largest_difference(actual, expected).values()) <= 1e-6


def test_an_optimizer_step_that_warms_up_is_exact() -> None:
    actual = run_on_warm_ranks(_train, 2, WarmsUp, SGD, {})[0]
    model = seeded(WarmsUp, *SGD)
    optimizer = model.configure_optimizers()
    for step, batch in enumerate(global_batches(STEPS)):
        optimizer.param_groups[0]["lr"] = min(1.0, (step + 1) / 4)
        optimizer.zero_grad()
        model.training_step(batch, step).backward()
        optimizer.step()
    assert max(largest_difference(actual, model.state_dict()).values()) <= 1e-6


class DropsNaN(ClickModel):
    """Meets a loss that is NaN, and drops its gradients."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 2 else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if any(not p.grad.isfinite().all() for p in self.mlp.parameters()):
            optimizer.zero_grad()


def _frozen_through_nan(part: bool) -> dict[str, Tensor]:
    model = seeded(DropsNaN, *SGD)
    for name, parameter in model.ebc.named_parameters():
        parameter.requires_grad_(part and "wide" in name)
    return train_sharded(model, STEPS)[0].final_state


@pytest.mark.parametrize("part", [False, True])
def test_frozen_tables_stay_through_gradients_that_are_not_finite(part: bool) -> None:
    actual = run_on_warm_ranks(_frozen_through_nan, 2, part)[0]
    expected = seeded(DropsNaN, *SGD).state_dict()
    for name in ("narrow", "shared") + (() if part else ("wide",)):
        key = f"ebc.embedding_bags.{name}.weight"
        assert torch.equal(actual[key], expected[key])


def _refused_between() -> dict[str, Any]:
    rank, _ = rank_and_num_ranks()
    model = seeded(EvaluatedModel, *SGD)
    make_trainer().fit(model, rank_loader(4, rank))
    initial = model.final_state
    output = []
    fused = {"embedding_update": "fused"}
    for strategy, options in (
        (fused, {"gradient_clip_val": 1.0}),
        (fused, {"accumulate_grad_batches": 4}),
        ({"memory_bytes_per_rank": 10_000, "sharding_types": ["table_wise"]}, {}),
    ):
        try:
            make_trainer(strategy, **options).fit(model, rank_loader(4, rank))
        except Exception as error:
            output.append(type(error).__name__)
    model.options = {"lr": 0.0}
    make_trainer().fit(model, rank_loader(1, rank))
    return {"initial": initial, "after": model.final_state, "output": output}


def test_a_refused_fit_leaves_the_trained_tables_as_they_are() -> None:
    for actual in run_on_warm_ranks(_refused_between, 2):
        assert actual["output"] == ["UnsupportedError", "UnsupportedError", "InfeasiblePlanError"]
    actual = run_on_warm_ranks(_refused_between, 2)[0]
    assert all(
        torch.equal(actual["initial"][key], actual["after"][key]) for key in actual["initial"]
    )


def _frozen_then_learning() -> list[dict[str, Tensor]]:
    rank, _ = rank_and_num_ranks()
    model = seeded(EvaluatedModel, *SGD)
    model.ebc.requires_grad_(False)
    states = []
    for frozen in (True, False):
        if not frozen:
            model.ebc.requires_grad_(True)
        make_trainer().fit(model, rank_loader(4, rank))
        states.append(model.final_state)
    return states


def test_tables_that_are_unfrozen_between_two_fits_learn_in_the_second() -> None:
    first, second = run_on_warm_ranks(_frozen_then_learning, 2)[0]
    model = seeded(EvaluatedModel, *SGD)
    model.ebc.requires_grad_(False)
    model = train_unsharded(model, 4, 2)
    assert max(largest_difference(first, model.final_state).values()) <= 1e-6
    model.ebc.requires_grad_(True)
    model = train_unsharded(model, 4, 2)
    assert max(largest_difference(second, model.final_state).values()) <= 1e-6


def _replaced_between_fits() -> dict[str, Tensor]:
    rank, _ = rank_and_num_ranks()
    model = seeded(EvaluatedModel, *SGD)
    make_trainer().fit(model, rank_loader(2, rank))
    model.ebc = seeded(EvaluatedModel, *SGD).ebc
    model.options = {"lr": 0.0}
    make_trainer().fit(model, rank_loader(1, rank))
    return model.final_state


def test_tables_that_the_user_puts_in_the_place_of_trained_ones_bring_their_own_rows() -> None:
    actual = run_on_warm_ranks(_replaced_between_fits, 2)[0]
    expected = seeded(EvaluatedModel, *SGD).state_dict()
    assert all(torch.equal(actual[key], expected[key]) for key in expected if "embedding" in key)


def _refused_on_meta() -> str:
    model = ClickModel(*SGD, meta=True)
    try:
        train_sharded(model, 2, {"embedding_update": "fused"}, gradient_clip_val=1.0)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_refusal_is_not_hidden_where_tables_are_on_meta() -> None:
    for output in run_on_warm_ranks(_refused_on_meta, 2):
        assert output.startswith("UnsupportedError: gradient_clip_val=1.0")


class Borrows(ClickModel):
    """Takes the tables of another module."""

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self(batch)


def _borrowed() -> str:
    rank, _ = rank_and_num_ranks()
    model = seeded(EvaluatedModel, *SGD)
    make_trainer().fit(model, rank_loader(2, rank))
    other = Borrows(*SGD)
    other.ebc = model.ebc
    try:
        make_trainer().validate(other, rank_loader(1, rank), verbose=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_tables_that_another_module_sharded_are_refused() -> None:
    for output in run_on_warm_ranks(_borrowed, 2):
        assert output.startswith(
            "ShardingError: 'ebc' was sharded as a part of another LightningModule"
        )


class TinyTables(ClickModel):
    """Tables of one to five rows, a gender or a weekday."""

    def _build(self) -> None:
        configs = [
            EmbeddingBagConfig(
                name=f"t{i}", embedding_dim=8, num_embeddings=num_rows, feature_names=["a"]
            )
            for i, num_rows in enumerate((1000, 1, 2, 3, 4, 5, 1))
        ]
        self.ebc = EmbeddingBagCollection(tables=configs)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(
            keys=FEATURES, values=batch["ids"] * 0, lengths=batch["lengths"]
        )
        return self.mlp(self.ebc(features).values()).squeeze(-1)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_tables_of_a_few_rows_train_under_the_default_plan(num_ranks: int) -> None:
    actual = run_on_warm_ranks(_train, num_ranks, TinyTables, SGD, {})[0]
    reference = train_unsharded(seeded(TinyTables, *SGD), STEPS, num_ranks).final_state
    assert max(largest_difference(actual, reference).values()) <= 1e-6


def test_a_row_wise_cut_that_leaves_a_rank_without_rows_is_refused() -> None:
    with pytest.raises(
        RankFailed, match="PlanError: table 'ebc.t1': row_wise: 1 rows in equal blocks leave"
    ):
        run_on_warm_ranks(
            _train, 2, TinyTables, SGD, {"tables": {"t1": {"sharding_types": ["row_wise"]}}}
        )


def _draws() -> tuple[list[float], list[float]]:
    draws: list[float] = []
    model = seeded(ClickModel, *SGD)
    model.on_train_start = lambda: draws.extend(torch.rand(2).tolist())  # type: ignore[method-assign]
    torch.manual_seed(3)
    train_sharded(model, 2)
    torch.manual_seed(3)
    return draws, torch.rand(2).tolist()


def test_random_numbers_stay_alike_on_all_ranks_through_setup() -> None:
    first, second = run_on_warm_ranks(_draws, 2)
    assert first[0] == second[0]


def _one_rank_without_tables() -> None:
    rank, _ = rank_and_num_ranks()
    model = seeded(ClickModel, *SGD)
    if rank == 1:
        model.ebc = nn.Identity()
    make_trainer().fit(model, rank_loader(2, rank))


def test_a_rank_without_tables_is_reported_to_all() -> None:
    with pytest.raises(RankFailed) as failed:
        run_on_warm_ranks(_one_rank_without_tables, 2)
    assert (
        len(
            re.findall("^.*ShardingError: the ranks have different tables", str(failed.value), re.M)
        )
        == 2
    )


def _asks_what_an_unsharded_collection_answers() -> list[Any]:
    model = seeded(ClickModel, *SGD)
    answers: list[Any] = []

    def ask() -> None:
        answers.append([config.name for config in model.ebc.embedding_bag_configs()])
        answers.append(model.ebc.is_weighted())

    model.on_train_start = ask  # type: ignore[method-assign]
    train_sharded(model, 1)
    return answers


def test_a_sharded_collection_answers_what_the_unsharded_one_would() -> None:
    assert run_on_warm_ranks(_asks_what_an_unsharded_collection_answers, 2)[0] == [
        ["wide", "narrow", "shared"],
        False,
    ]


def _half() -> list[str]:
    import warnings

    from torchrec.modules.embedding_configs import DataType

    from tests.support.click_model import bag_configs

    class HalfModel(ClickModel):
        def _build(self) -> None:
            configs = bag_configs()
            configs[1].data_type = DataType.FP16
            self.ebc = EmbeddingBagCollection(tables=configs)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train_sharded(seeded(HalfModel, *SGD), 2)
    return [str(w.message) for w in caught if "float16" in str(w.message)]


def test_float16_tables_train_and_say_that_they_round() -> None:
    output = run_on_warm_ranks(_half, 2)[0]
    assert len(output) == 1
    assert output[0].startswith("table 'ebc.narrow' has float16 rows")


# -- a backward that the user's code calls


class BackwardByHand(ClickModel):
    """Calls backward by itself: in training_step, in a step of evaluation, or after an optimizer's
    step."""

    def __init__(self, optimizer: type, options: dict[str, Any], place: str) -> None:
        super().__init__(optimizer, options)
        self.place = place

    def _backward(self, place: str, batch: dict[str, Tensor]) -> None:
        if place == self.place:
            with torch.enable_grad():
                self(batch).square().mean().backward()
            self.zero_grad()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self._backward("training", batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._backward("validation", batch)

    def on_train_batch_end(self, outputs: Any, batch: dict[str, Tensor], batch_idx: int) -> None:
        self._backward("batch end", batch)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self._backward("predict", batch)
        return self(batch)


def _by_hand(place: str, update: str) -> tuple[str, dict[str, Tensor]]:
    model = seeded(BackwardByHand, *SGD, place)
    trainer = make_trainer({"embedding_update": update}, inference_mode=False, max_epochs=1)
    message, data = "", rank_loader(STEPS, rank_and_num_ranks()[0])
    try:
        trainer.fit(model, data, rank_loader(2, 0))
        trainer.predict(model, data)
        if place == "script":
            model._backward(place, next(iter(data)))
    except OptimizerError as error:
        message = str(error)
    return message, {} if update == "fused" else model.final_state


PLACES = ["training", "validation", "batch end", "predict", "script"]


def test_a_backward_by_hand_moves_no_table() -> None:
    cases: dict[str, tuple[Any, ...]] = {place: (_by_hand, place, "fused") for place in PLACES}
    cases |= {f"{place} sparse": (_by_hand, place, "sparse") for place in ["none", "validation"]}
    for results in run_each_on_ranks(cases, 2):
        for place in PLACES:
            assert "user code has called reaches table 'ebc.wide'" in results[place][0], place
        # Gradients that zero_grad drops change nothing.
        assert results["validation sparse"][0] == ""
        assert (
            max(
                largest_difference(
                    results["validation sparse"][1], results["none sparse"][1]
                ).values()
            )
            == 0.0
        )
