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
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.modules.debug_embedding_modules import DebugEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from lightning_distrec import TorchRecShardedStrategy, TunedDDPStrategy
from lightning_distrec.errors import ConfigError
from tests.support.cases import Case, check_refused, click_case, run_case
from tests.support.click_model import (
    ClickModel,
    SequenceModel,
    bag_configs,
    rank_loader,
    seeded,
    train_sharded,
)
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS

SGD = (torch.optim.SGD, {"lr": 0.1})
FUSED_ADAM = (torch.optim.Adam, {"lr": 0.1, "fused": True})
FUSED = {"embedding_update": "fused"}


class MyScaler(torch.amp.GradScaler):
    """A subclass: it may do anything."""


def scaled(scaler: type = torch.amp.GradScaler) -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler("cpu"))]}


def pruned() -> dict[str, Any]:
    return {"callbacks": [ModelPruning("l1_unstructured", amount=0.5)]}


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


def by_columns(tables: dict[str, int]) -> Case:
    options = {name: {"min_partition": number} for name, number in tables.items()}
    strategy = {"sharding_types": ["column_wise"], "tables": options}
    return refused(kind=Wide, strategy=strategy)


LATER = {"callbacks": [GradientAccumulationScheduler({1: 2})]}
REFUSED: dict[str, tuple[Case, str]] = {
    "accumulation later": (refused(strategy=FUSED, trainer=LATER), "accumulate_grad_batches=2"),
    "pruning": (
        refused(trainer=pruned),
        "ModelPruning would prune 'weight' of EmbeddingBag, which is sharded over the ranks",
    ),
    "64-true": (
        refused(trainer={"precision": "64-true"}),
        "precision='64-true'): FBGEMM has no float64 tables. Use one of '32-true'",
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
    "sequence cut": (
        refused(kind=SequenceModel, strategy={"sharding_types": ["table_row_wise"]}),
        "EmbeddingCollection's table can be table_wise, row_wise, column_wise",
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


def _debug_in_detail(strategy: Any) -> str:
    """Return what a fit raises with TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    trainer = pl.Trainer(strategy=strategy, devices=2, **DEFAULTS)
    with pytest.raises(ConfigError) as refused:
        trainer.fit(seeded(ClickModel, *SGD), rank_loader(1, rank_and_num_ranks()[0]))
    dist.set_debug_level(level)
    return str(refused.value)


def test_debugging_in_detail_is_refused_before_torch_ends_the_ranks() -> None:
    kinds = {"layers": TunedDDPStrategy(), "tables": TorchRecShardedStrategy()}
    calls = {name: (_debug_in_detail, strategy) for name, strategy in kinds.items()}
    for messages in run_each_on_ranks(calls, 2):
        for message in messages.values():
            assert "TORCH_DISTRIBUTED_DEBUG=DETAIL: with it torch ends a process" in message
            assert "Set INFO" in message


def _fit_with_batch_norm(strategy: str) -> str:
    model = BoringModel()
    model.layer = torch.nn.Sequential(torch.nn.BatchNorm1d(32), model.layer)
    trainer = pl.Trainer(strategy=strategy, devices=2, sync_batchnorm=True, **DEFAULTS)
    with pytest.raises(ConfigError) as refused:
        trainer.fit(model)
    return str(refused.value)


def test_batch_normalization_over_ranks_is_refused_on_a_cpu() -> None:
    kinds = ["ddp_tuned", "fsdp_tuned", "torchrec_sharded"]
    for results in run_each_on_ranks({kind: (_fit_with_batch_norm, kind) for kind in kinds}, 2):
        for message in results.values():
            assert "'layer.0' is BatchNorm1d: torch's SyncBatchNorm computes" in message
