"""Tensors of a step that are left on the host are refused by all ranks, before an exchange that
some would wait in."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from tests.support.click_model import FEATURES, seeded
from tests.support.followed_fits import Deaf, PlainBags, batch_of
from tests.support.host_cuda.runs import DeviceRanks
from tests.support.ranks import rank_and_num_ranks
from tests.support.trainers import make_trainer


class LengthsOnHost(Deaf):
    """Makes lengths without a device."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(
            keys=FEATURES, values=batch["ids"], lengths=batch["lengths"].cpu()
        )
        return self.mlp(self.ebc(features).values()).squeeze(-1)


class WeightsOnHost(Deaf):
    """Makes weights without a device, which its tables do not even take."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        weights = torch.ones(len(batch["ids"]))
        features = KeyedJaggedTensor(
            keys=FEATURES, values=batch["ids"], lengths=batch["lengths"], weights=weights
        )
        return self.mlp(self.ebc(features).values()).squeeze(-1)


class IdsOnHost(PlainBags):
    """Makes ids without a device."""

    def _ids(self, batch: dict[str, Tensor]) -> Tensor:
        return torch.zeros(batch["single"].shape, dtype=torch.long)


class IdsOnHostOfOneRank(IdsOnHost):
    """The same on one rank alone."""

    def _ids(self, batch: dict[str, Tensor]) -> Tensor:
        ids = super()._ids(batch)
        return ids if rank_and_num_ranks()[0] else ids.to(self.device)


CASES: dict[type, tuple[str, str]] = {
    LengthsOnHost: ("ebc", "lengths"),
    WeightsOnHost: ("ebc", "weights"),
    IdsOnHost: ("ebc", "ids"),
    IdsOnHostOfOneRank: ("ebc", "ids"),
}


def _fit(kind: type, depth: int) -> Any:
    strategy = {
        "convert_embeddings": "all",
        "process_group_backend": "nccl",
        "prefetch": {"depth": depth},
    }
    trainer = make_trainer(strategy, accelerator="gpu")
    model = seeded(kind, torch.optim.SGD, {"lr": 0.1}, pooling="mean")
    trainer.fit(model, DataLoader([batch_of(kind, number) for number in range(4)], batch_size=None))


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("kind", CASES)
def test_tensors_that_are_left_on_the_host_are_named_on_every_rank(
    devices: DeviceRanks, kind: type, depth: int
) -> None:
    path, name = CASES[kind]
    for seen in devices.call(_fit, kind, depth):
        assert f"IdsError: '{path}' has {name} on cpu, and its tables are on cuda:" in seen.error
