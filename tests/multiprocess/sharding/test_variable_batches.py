"""KeyedJaggedTensors whose features have batches of unequal size: exact, or told."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from tests.support.click_model import FEATURES, ClickModel, seeded, train_sharded
from tests.support.ranks import RankFailed, run_on_warm_ranks


class SharesBags(ClickModel):
    """Looks up each distinct bag of feature a once, and spreads it over the batch by inverse indices."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        size = len(batch["label"])
        inverse = torch.arange(size).repeat(len(FEATURES), 1)
        inverse[0] = inverse[0] // 2
        first = batch["lengths"][: size // 2]
        ids = torch.cat([batch["ids"][: int(first.sum())], batch["ids"][int(batch["lengths"][:size].sum()) :]])
        features = KeyedJaggedTensor(
            keys=FEATURES,
            values=ids,
            lengths=torch.cat([first, batch["lengths"][size:]]),
            stride_per_key_per_rank=[[size // 2], [size], [size], [size]],
            inverse_indices=(FEATURES, inverse),
        )
        return self.mlp(self.ebc(features).values()).squeeze(-1)


def _train(cut: str, optimizer: Any, pooling: str) -> list[float]:
    strategy = {"sharding_types": [cut], "tables": {"narrow": {"min_partition": 4}, "shared": {"min_partition": 4}}}
    model = seeded(SharesBags, *optimizer, pooling)
    train_sharded(model, 4, strategy)
    return model.losses


def _first_loss(pooling: str) -> float:
    from tests.support.click_model import make_batch

    model = seeded(SharesBags, torch.optim.SGD, {"lr": 1.0}, pooling)
    return float(model.training_step(make_batch(0), 0).detach())


@pytest.mark.parametrize("pooling", ["sum", "mean"])
@pytest.mark.parametrize("cut", ["table_wise", "column_wise"])
def test_variable_batches_look_up_what_the_unsharded_tables_would(cut: str, pooling: str) -> None:
    actual = run_on_warm_ranks(_train, 2, cut, (torch.optim.SGD, {"lr": 1.0}), pooling)[0]
    assert actual[0] == pytest.approx(_first_loss(pooling), abs=1e-6)
    assert len(actual) == 4


@pytest.mark.parametrize(
    ("cut", "optimizer", "pooling", "message"),
    [
        ("data_parallel", (torch.optim.Adam, {}), "sum", "because it is data_parallel"),
        ("row_wise", (torch.optim.SGD, {"lr": 1.0}), "mean", "a mean-pooled table of it is sharded by rows"),
    ],
)
def test_variable_batches_that_the_kernels_get_wrong_are_reported(
    cut: str, optimizer: Any, pooling: str, message: str
) -> None:
    with pytest.raises(RankFailed, match=f"ShardingError: 'ebc' was called with unequal batch sizes.*{message}"):
        run_on_warm_ranks(_train, 2, cut, optimizer, pooling)
