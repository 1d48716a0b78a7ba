"""Layers without tables that begin to learn in the middle of a run are averaged over the ranks from
then on.

DistributedDataParallel passes over what did not learn when it was made: each rank went on with
weights of its own.
"""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_distrec import TorchRecShardedStrategy, TunedDDPStrategy, TunedFSDPStrategy
from tests.support.dense_models import (
    Unfreezes,
    UnfreezesAlone,
    UnfreezesBesideATable,
    loader,
    whole_batches,
)
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS


def _unfrozen(kind: type[pl.LightningModule], strategy: Any) -> dict[str, Tensor]:
    pl.seed_everything(5)
    rank, num_ranks = rank_and_num_ranks()
    trainer = pl.Trainer(strategy=strategy, devices=num_ranks, **DEFAULTS | {"max_epochs": 2})
    trainer.fit(kind(), loader(rank, num_ranks))
    return {name: value.clone() for name, value in trainer.strategy.full_state_dict().items()}


CASES: dict[str, tuple[Any, ...]] = {
    "ddp_tuned": (_unfrozen, Unfreezes, TunedDDPStrategy()),
    "fsdp_tuned": (_unfrozen, Unfreezes, TunedFSDPStrategy(min_num_parameters=8)),
    "torchrec_sharded without tables": (_unfrozen, Unfreezes, TorchRecShardedStrategy()),
    "torchrec_sharded": (_unfrozen, UnfreezesBesideATable, TorchRecShardedStrategy(min_rows=1)),
    "torchrec_sharded, nothing dense at first": (
        _unfrozen,
        UnfreezesAlone,
        TorchRecShardedStrategy(min_rows=1),
    ),
}


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Tensor]]:
    return run_each_on_ranks(CASES, 2)[0]


@pytest.mark.parametrize("case", CASES)
def test_layers_that_are_unfrozen_learn_as_in_one_process(
    results: dict[str, dict[str, Tensor]], case: str
) -> None:
    pl.seed_everything(5)
    single = CASES[case][1]()
    pl.Trainer(**DEFAULTS | {"max_epochs": 2}).fit(single, whole_batches(2))
    for name, value in single.state_dict().items():
        torch.testing.assert_close(results[case][name], value, atol=1e-5, rtol=1e-5, msg=name)
