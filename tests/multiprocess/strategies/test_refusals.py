"""What is not exact, or not possible, is an error of ours before the first step, on every rank."""

import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelPruning
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.precision import MixedPrecision
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_distrec import TorchRecShardedStrategy, TunedDDPStrategy
from lightning_distrec.errors import ConfigError, UnsupportedError
from tests.support.click_model import (
    ClickModel,
    SequenceModel,
    bag_configs,
    rank_loader,
    seeded,
    train_sharded,
)
from tests.support.embedding_models import TwoTower, loader, pairs, too_far, train_unsharded
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS, make_trainer

SGD = (torch.optim.SGD, {"lr": 0.1})
ADAM = (torch.optim.Adam, {"lr": 0.1})
FUSED_ADAM = (torch.optim.Adam, {"lr": 0.1, "fused": True})
FUSED = {"embedding_update": "fused"}


class MySGD(torch.optim.SGD):
    """A subclass: it may do anything."""


class MyScaler(torch.amp.GradScaler):
    """A subclass: it may do anything."""


def _scaled(scaler: torch.amp.GradScaler) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler)


def _case(name: str) -> tuple[type, tuple[type, dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Model class, optimizer, options of the strategy, options of the Trainer."""
    return {
        "accumulation": (ClickModel, SGD, FUSED, {"accumulate_grad_batches": 4}),
        "accumulation later": (
            ClickModel,
            SGD,
            FUSED,
            {"callbacks": [GradientAccumulationScheduler({1: 2})]},
        ),
        "pruning": (
            ClickModel,
            SGD,
            {},
            {"callbacks": [ModelPruning("l1_unstructured", amount=0.5)]},
        ),
        "64-true": (ClickModel, SGD, {}, {"precision": "64-true"}),
        "clip fused": (ClickModel, SGD, FUSED, {"gradient_clip_val": 1.0}),
        "scaler fused": (
            ClickModel,
            SGD,
            FUSED,
            {"plugins": [_scaled(torch.amp.GradScaler("cpu"))]},
        ),
        "scaler of its own": (ClickModel, SGD, {}, {"plugins": [_scaled(MyScaler("cpu"))]}),
        "scaler in Adam": (
            ClickModel,
            FUSED_ADAM,
            {},
            {"plugins": [_scaled(torch.amp.GradScaler("cpu"))]},
        ),
        "sparse Adam": (ClickModel, ADAM, {"embedding_update": "sparse"}, {}),
        "fused Adam": (ClickModel, ADAM, {"embedding_update": "fused"}, {}),
        "fused momentum": (
            ClickModel,
            (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
            {"tables": {"wide": {"embedding_update": "fused"}}},
            {},
        ),
        "lazy on CPU": (ClickModel, ADAM, {"embedding_update": "fused_lazy"}, {}),
        "subclass": (ClickModel, (MySGD, {"lr": 0.1}), {}, {}),
        "Adafactor": (ClickModel, (torch.optim.Adafactor, {}), {}, {}),
        "unknown table": (
            ClickModel,
            SGD,
            {"tables": {"narow": {"embedding_update": "dense"}}},
            {},
        ),
        "unknown option": (
            ClickModel,
            SGD,
            {"tables": {"narrow": {"embeding_update": "dense"}}},
            {},
        ),
        "column RowWise": (
            ClickModel,
            (RowWiseAdagrad, {"lr": 0.1}),
            {"sharding_types": ["column_wise"]},
            {},
        ),
        "sequence cut": (SequenceModel, SGD, {"sharding_types": ["table_row_wise"]}, {}),
        "memory": (
            ClickModel,
            SGD,
            {"memory_bytes_per_rank": 1000, "planning": {"reserve": "15%"}},
            {},
        ),
        "dense memory": (
            ClickModel,
            ADAM,
            {
                "memory_bytes_per_rank": 11000,
                "batch_size_per_rank": 1,
                "planning": {"reserve": "15%"},
            },
            {},
        ),
    }[name]


MESSAGES = {
    "accumulation": "UnsupportedError: .*accumulate_grad_batches=4: table "
    "'ebc.wide'.*embedding_update='auto'",
    "accumulation later": "UnsupportedError: .*accumulate_grad_batches=2",
    "pruning": "UnsupportedError: ModelPruning would prune 'weight' of EmbeddingBag, which is "
    "sharded over the ranks",
    "64-true": r"UnsupportedError: .*precision='64-true'\): FBGEMM has no float64 tables. Use one of '32-true'",
    "clip fused": "UnsupportedError: .*gradient_clip_val=1.0: table 'ebc.wide' is updated inside "
    "of backward",
    "scaler fused": "UnsupportedError: .*scales the loss and may skip steps, but table 'ebc.wide'",
    "scaler of its own": "UnsupportedError: .*the loss scaler MyScaler looks for overflows on its "
    "own rank only",
    "scaler in Adam": r"UnsupportedError: .*Adam\(fused=True\) looks for overflows by itself",
    "sparse Adam": "OptimizerError: .*'ebc.wide': embedding_update='sparse', but Adam moves rows "
    "that no id touched",
    "fused Adam": "OptimizerError: .*'ebc.wide': embedding_update='fused', but Adam moves rows "
    "that no id touched",
    "fused momentum": "OptimizerError: .*'ebc.wide': .*FBGEMM's SGD has no "
    "momentum=0.9.*embedding_update='dense'",
    "lazy on CPU": "OptimizerError: .*FBGEMM has no Adam on CPU",
    "subclass": "OptimizerError: .*MySGD is not known to give the same numbers",
    "Adafactor": "OptimizerError: .*Adafactor is not known to give the same numbers",
    "unknown table": "ConfigError: .*no table 'narow'; did you mean 'narrow'",
    "unknown option": "ConfigError: .*no option 'embeding_update'; did you mean 'embedding_update'",
    "column RowWise": "PlanError: .*RowWiseAdagrad keeps one number for each row",
    "sequence cut": "PlanError: .*EmbeddingCollection's table can be table_wise, row_wise, "
    "column_wise",
    "memory": r"InfeasiblePlanError: .* table 'ebc.wide' fits on no rank: .* and has 850 B: [\d.]+ K?i?B too few",
    "dense memory": r"InfeasiblePlanError: .*the tables do not fit: table 'ebc.wide' is the largest of tables that need",
}


def _refused(name: str) -> str:
    kind, (optimizer, options), strategy, trainer_options = _case(name)
    model = seeded(kind, optimizer, options)
    try:
        train_sharded(model, 2, strategy, **trainer_options)
    except Exception as error:
        assert not model.losses, "a step was taken before the error"
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _refused_all() -> dict[str, str]:
    return {name: _refused(name) for name in MESSAGES}


@pytest.fixture(scope="module")
def refusals() -> list[dict[str, str]]:
    """What each rank raised, by case."""
    return run_on_warm_ranks(_refused_all, 2)


@pytest.mark.parametrize("name", MESSAGES)
def test_is_refused_by_name_on_every_rank_before_the_first_step(
    refusals: list[dict[str, str]], name: str
) -> None:
    for message in refusals:
        assert re.match(MESSAGES[name], message[name], re.DOTALL), message[name]
    kinds = {message[name].split(":")[0] for message in refusals}
    assert len(kinds) == 1


class FailsOnRankOne(ClickModel):
    """Its configure_optimizers fails on one rank."""

    def configure_optimizers(self) -> Any:
        if rank_and_num_ranks()[0] == 1:
            raise KeyError("no learning rate here")
        return super().configure_optimizers()


def _fails_on_rank_one() -> None:
    train_sharded(seeded(FailsOnRankOne, *SGD), 2)


def test_what_fails_on_one_rank_is_reported_on_the_others() -> None:
    with pytest.raises(RankFailed) as failed:
        run_on_warm_ranks(_fails_on_rank_one, 2)
    assert "KeyError: 'no learning rate here'" in str(failed.value)
    assert "RankError: rank 1 failed in setup: KeyError: 'no learning rate here'" in str(
        failed.value
    )


class OtherTables(ClickModel):
    """Has another number of rows on each rank."""

    def _build(self) -> None:
        configs = bag_configs()
        configs[0].num_embeddings += rank_and_num_ranks()[0]
        self.ebc = EmbeddingBagCollection(tables=configs)


def _other_tables() -> None:
    train_sharded(seeded(OtherTables, *SGD), 2)


def test_ranks_with_different_tables_are_reported() -> None:
    with pytest.raises(RankFailed) as failed:
        run_on_warm_ranks(_other_tables, 2)
    assert (
        len(
            re.findall("^.*ShardingError: the ranks have different tables", str(failed.value), re.M)
        )
        == 2
    )


def _left_alone() -> tuple[list[str], str]:
    """Return the warnings about it, and the start table."""
    import contextlib
    import io
    import warnings

    from torchrec.modules.debug_embedding_modules import DebugEmbeddingBagCollection

    class WithDebugging(ClickModel):
        def _build(self) -> None:
            super()._build()
            self.debugged = DebugEmbeddingBagCollection(bag_configs(), torch.device("cpu"))

    out = io.StringIO()
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(out):
        warnings.simplefilter("always")
        model = seeded(WithDebugging, *SGD)
        make_trainer({"find_unused_parameters": True}).fit(
            model, rank_loader(2, rank_and_num_ranks()[0])
        )
    assert type(model.debugged.ebc) is EmbeddingBagCollection
    return [
        str(w.message) for w in caught if "is not sharded, every rank" in str(w.message)
    ], out.getvalue()


def test_modules_that_cannot_be_sharded_are_left_alone_with_one_warning() -> None:
    (reported, start_table), (silent, _) = run_on_warm_ranks(_left_alone, 2)
    reason = (
        "is not sharded, every rank has all of it: DebugEmbeddingBagCollection does more "
        "than look up rows"
    )
    assert reported == [f"'debugged' {reason}."]
    assert silent == []
    assert reason in " ".join(start_table.split())


def _double(convert: str) -> Any:
    model = seeded(TwoTower)
    rank, _ = rank_and_num_ranks()
    trainer = make_trainer({"convert_embeddings": convert}, precision="64-true")
    try:
        trainer.fit(model, loader([pairs(step, rank) for step in range(3)]))
    except UnsupportedError as error:
        return str(error)
    return model.state_dict()


def test_float64_is_refused_where_a_table_is_sharded_only() -> None:
    (state, message), _ = run_on_warm_ranks(_call_both, 2)
    assert re.match(r"Trainer\(precision='64-true'\): FBGEMM has no float64 tables", message)
    batches = [[pairs(step, rank) for rank in range(2)] for step in range(3)]
    expected = train_unsharded(seeded(TwoTower).double(), batches).state_dict()
    assert all(value.dtype == torch.float64 for value in state.values())
    assert too_far(state, expected, 1e-12) == {}


def _call_both() -> tuple[Any, Any]:
    return _double("none"), _double("all")


def _updates_by_itself() -> str:
    from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

    class Fused(ClickModel):
        def _build(self) -> None:
            self.ebc = FusedEmbeddingBagCollection(bag_configs(), *SGD)

    try:
        make_trainer().fit(seeded(Fused, *SGD), rank_loader(1, rank_and_num_ranks()[0]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def test_a_collection_that_updates_itself_is_refused() -> None:
    for message in run_on_warm_ranks(_updates_by_itself, 2):
        assert message.startswith(
            "ShardingError: 'ebc' is a FusedEmbeddingBagCollection, which updates its tables "
        )
        assert "Use EmbeddingBagCollection" in message


class KeepsAList(ClickModel):
    """Calls its tables through a list, past the module that replaced them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.hidden = [self.ebc]

    def forward(self, batch: Any) -> Any:
        self.ebc, retained = self.hidden[0], self.ebc
        try:
            return super().forward(batch)
        finally:
            self.ebc = retained


def _keeps_a_list() -> None:
    train_sharded(seeded(KeepsAList, *SGD), 2)


def test_calling_the_unsharded_tables_by_an_old_reference_is_reported() -> None:
    with pytest.raises(
        RankFailed, match="ShardingError: the unsharded collection of 'ebc' was called"
    ):
        run_on_warm_ranks(_keeps_a_list, 2)


def _alone() -> str:
    import contextlib
    import io

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        model, trainer = train_sharded(seeded(ClickModel, *SGD), 3)
    assert isinstance(trainer, pl.Trainer)
    assert len(model.losses) == 3
    return out.getvalue()


def test_one_device_works_and_shows_that_nothing_is_sent() -> None:
    assert "Nothing is sent: there is only one rank" in run_on_warm_ranks(_alone, 1)[0]


def _widths() -> list[str]:
    message = []
    for tables in (
        {"wide": {"min_partition": 4}, "narrow": {"min_partition": 8}},
        {"wide": {"min_partition": 12}},
    ):
        model = seeded(Wide, *SGD)
        try:
            train_sharded(model, 1, {"sharding_types": ["column_wise"], "tables": tables})
        except Exception as error:
            message.append(f"{type(error).__name__}: {error}")
    return message


class Wide(SequenceModel):
    """Has rows of 16 columns, which 12 do not divide."""

    def _build(self) -> None:
        super()._build()
        configs = [
            EmbeddingConfig(name=name, embedding_dim=16, num_embeddings=60, feature_names=features)
            for name, features in (("wide", ["a", "b"]), ("narrow", ["c", "d"]))
        ]
        self.ebc = EmbeddingCollection(tables=configs)
        self.first = torch.nn.Linear(64, 56, bias=False)


def test_shards_of_unequal_width_in_an_embedding_collection_are_refused() -> None:
    for unequal, no_divisor in run_on_warm_ranks(_widths, 2):
        # Rank 0 plans, and the others say so.
        assert unequal.replace("rank 0: ", "").startswith(
            "PlanError: tables of 'ebc' may be column_wise with unequal min_partition"
        )
        assert no_divisor.startswith(
            "PlanError: table 'ebc.wide': column_wise: min_partition=12 divides 16 columns"
        )


def _debug_in_detail() -> list[str]:
    """Return what fits raise with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    messages = []
    for strategy in (TunedDDPStrategy(), TorchRecShardedStrategy()):
        trainer = pl.Trainer(strategy=strategy, devices=rank_and_num_ranks()[1], **DEFAULTS)
        try:
            trainer.fit(seeded(ClickModel, *SGD), rank_loader(1, rank_and_num_ranks()[0]))
        except ConfigError as error:
            messages.append(str(error))
    dist.set_debug_level(level)
    return messages


def test_debugging_in_detail_is_refused_before_torch_ends_the_ranks() -> None:
    for messages in run_on_warm_ranks(_debug_in_detail, 2):
        assert len(messages) == 2
        assert all(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL: with it torch ends a process" in text
            for text in messages
        )
        assert all("Set INFO" in text for text in messages)


def _fit_with_batch_norm(strategy: str, layer: type) -> str:
    model = BoringModel()
    model.layer = torch.nn.Sequential(layer(32), model.layer)
    trainer = pl.Trainer(
        strategy=strategy, devices=2, sync_batchnorm=True, **(DEFAULTS | {"max_steps": 1})
    )
    try:
        trainer.fit(model)
    except ConfigError as error:
        return str(error)
    return f"{trainer.global_step} step"


def test_batch_normalization_over_ranks_is_refused_on_a_cpu() -> None:
    layers = {"BatchNorm1d": torch.nn.BatchNorm1d, "LayerNorm": torch.nn.LayerNorm}
    kinds = ["ddp_tuned", "fsdp_tuned", "torchrec_sharded"]
    calls = {
        f"{kind} {name}": (_fit_with_batch_norm, kind, layers[name])
        for kind in kinds
        for name in layers
    }
    for results in run_each_on_ranks(calls, 2):
        for call, result in results.items():
            expected = (
                "1 step"
                if "LayerNorm" in call
                else ("'layer.0' is BatchNorm1d: torch's SyncBatchNorm computes")
            )
            assert expected in result, (call, result)
