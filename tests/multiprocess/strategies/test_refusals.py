"""What is not exact, or not possible, is an error of ours before the first step, on every rank."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelPruning
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.precision import MixedPrecision
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig
from torchrec.modules.debug_embedding_modules import DebugEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_distrec import TorchRecShardedStrategy, TunedDDPStrategy
from lightning_distrec.errors import ConfigError
from tests.support.cases import Case, case_of, check, check_refused, click_case, run_case
from tests.support.click_model import (
    ClickModel,
    SequenceModel,
    bag_configs,
    rank_loader,
    seeded,
    train_sharded,
)
from tests.support.embedding_models import TwoTower, pairs
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS

SGD = (torch.optim.SGD, {"lr": 0.1})
ADAM = (torch.optim.Adam, {"lr": 0.1})
FUSED_ADAM = (torch.optim.Adam, {"lr": 0.1, "fused": True})
MOMENTUM = (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})
FUSED = {"embedding_update": "fused"}


class MySGD(torch.optim.SGD):
    """A subclass: it may do anything."""


class MyScaler(torch.amp.GradScaler):
    """A subclass: it may do anything."""


def scaled(scaler: type = torch.amp.GradScaler) -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler("cpu"))]}


def pruned() -> dict[str, Any]:
    return {"callbacks": [ModelPruning("l1_unstructured", amount=0.5)]}


class OtherTables(ClickModel):
    """Has another number of rows on each rank."""

    def _build(self) -> None:
        configs = bag_configs()
        configs[0].num_embeddings += rank_and_num_ranks()[0]
        self.ebc = EmbeddingBagCollection(tables=configs)


class UpdatesItself(ClickModel):
    """Has a collection that updates its tables in backward."""

    def _build(self) -> None:
        self.ebc = FusedEmbeddingBagCollection(bag_configs(), *SGD)


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


def refused(optimizer: Any = SGD, kind: type = ClickModel, **values: Any) -> Case:
    return click_case(kind, optimizer, steps=2, **values)


def updated(optimizer: Any, update: str) -> Case:
    return refused(optimizer, strategy={"embedding_update": update})


def by_columns(tables: dict[str, int]) -> Case:
    options = {name: {"min_partition": number} for name, number in tables.items()}
    strategy = {"sharding_types": ["column_wise"], "tables": options}
    return refused(kind=Wide, strategy=strategy)


def in_memory(optimizer: Any, memory_bytes: int, **planning: Any) -> Case:
    strategy = {"memory_bytes_per_rank": memory_bytes, "planning": {"reserve": "15%"}}
    return refused(optimizer, strategy=strategy | planning)


LATER = {"callbacks": [GradientAccumulationScheduler({1: 2})]}
NOT_KNOWN = "is not known to give the same numbers"
MOVES = "but Adam moves rows that no id touched"
REFUSED: dict[str, tuple[Case, str]] = {
    "accumulation": (
        refused(strategy=FUSED, trainer={"accumulate_grad_batches": 4}),
        "accumulate_grad_batches=4: table 'ebc.wide'",
    ),
    "accumulation later": (refused(strategy=FUSED, trainer=LATER), "accumulate_grad_batches=2"),
    "pruning": (
        refused(trainer=pruned),
        "ModelPruning would prune 'weight' of EmbeddingBag, which is sharded over the ranks",
    ),
    "64-true": (
        refused(trainer={"precision": "64-true"}),
        "precision='64-true'): FBGEMM has no float64 tables. Use one of '32-true'",
    ),
    "clip fused": (
        refused(strategy=FUSED, trainer={"gradient_clip_val": 1.0}),
        "gradient_clip_val=1.0: table 'ebc.wide' is updated inside of backward",
    ),
    "scaler fused": (
        refused(strategy=FUSED, trainer=scaled),
        "scales the loss and may skip steps, but table 'ebc.wide'",
    ),
    "scaler of its own": (
        refused(trainer=partial(scaled, MyScaler)),
        "the loss scaler MyScaler looks for overflows on its own rank only",
    ),
    "scaler in Adam": (
        refused(FUSED_ADAM, trainer=scaled),
        "Adam(fused=True) looks for overflows by itself",
    ),
    "sparse Adam": (updated(ADAM, "sparse"), f"'ebc.wide': embedding_update='sparse', {MOVES}"),
    "fused Adam": (updated(ADAM, "fused"), f"'ebc.wide': embedding_update='fused', {MOVES}"),
    "fused momentum": (
        refused(MOMENTUM, strategy={"tables": {"wide": FUSED}}),
        "FBGEMM's SGD has no momentum=0.9",
    ),
    "lazy on CPU": (updated(ADAM, "fused_lazy"), "FBGEMM has no Adam on CPU"),
    "subclass": (refused((MySGD, {"lr": 0.1})), f"MySGD {NOT_KNOWN}"),
    "Adafactor": (refused((torch.optim.Adafactor, {})), f"Adafactor {NOT_KNOWN}"),
    "unknown table": (
        refused(strategy={"tables": {"narow": {"embedding_update": "dense"}}}),
        "no table 'narow'; did you mean 'narrow'",
    ),
    "unknown option": (
        refused(strategy={"tables": {"narrow": {"embeding_update": "dense"}}}),
        "no option 'embeding_update'; did you mean 'embedding_update'",
    ),
    "column RowWise": (
        refused((RowWiseAdagrad, {"lr": 0.1}), strategy={"sharding_types": ["column_wise"]}),
        "RowWiseAdagrad keeps one number for each row",
    ),
    "sequence cut": (
        refused(kind=SequenceModel, strategy={"sharding_types": ["table_row_wise"]}),
        "EmbeddingCollection's table can be table_wise, row_wise, column_wise",
    ),
    "memory": (in_memory(SGD, 1000), "table 'ebc.wide' fits on no rank: "),
    "dense memory": (
        in_memory(ADAM, 11000, batch_size_per_rank=1),
        "the tables do not fit: table 'ebc.wide' is the largest of tables that need",
    ),
    "other tables": (
        refused(kind=OtherTables),
        "ShardingError: the ranks have different tables",
    ),
    "updates itself": (
        refused(kind=UpdatesItself),
        "'ebc' is a FusedEmbeddingBagCollection, which updates its tables ",
    ),
    "unequal widths": (
        by_columns({"wide": 4, "narrow": 8}),
        "tables of 'ebc' may be column_wise with unequal min_partition",
    ),
    "no divisor": (
        by_columns({"wide": 12}),
        "table 'ebc.wide': column_wise: min_partition=12 divides 16 columns",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_by_name_on_every_rank_before_the_first_step(name: str) -> None:
    errors = check_refused(*REFUSED[name], started=0)
    assert len({error.split(":")[0] for error in errors}) == 1


def test_calling_the_unsharded_tables_by_an_old_reference_is_reported() -> None:
    words = "ShardingError: the unsharded collection of 'ebc' was called"
    check_refused(refused(kind=KeepsAList), words)


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


class WithDebugging(ClickModel):
    """Has a collection that does more than look up rows."""

    def _build(self) -> None:
        super()._build()
        self.debugged = DebugEmbeddingBagCollection(bag_configs(), torch.device("cpu"))


def test_modules_that_cannot_be_sharded_are_left_alone_with_one_warning() -> None:
    unused = {"find_unused_parameters": True}
    first, second = run_case(click_case(WithDebugging, strategy=unused, steps=2))
    reason = (
        "is not sharded, every rank has all of it: DebugEmbeddingBagCollection does more "
        "than look up rows"
    )
    assert f"'debugged' {reason}." in first.lines
    assert reason in first.lines[-1]
    assert not [line for line in second.lines if reason in line]


def test_float64_is_refused_where_a_table_is_sharded_only() -> None:
    fields = {"batch": pairs, "steps": 3, "trainer": {"precision": "64-true"}, "limit": 1e-12}
    check(case_of(TwoTower, strategy={"convert_embeddings": "none"}, **fields))
    both = case_of(TwoTower, strategy={"convert_embeddings": "all"}, **fields)
    check_refused(both, "Trainer(precision='64-true'): FBGEMM has no float64 tables", started=0)


def test_one_device_works_and_shows_that_nothing_is_sent() -> None:
    check(click_case(ClickModel, num_ranks=1, told=("Nothing is sent: there is only one rank",)))


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
