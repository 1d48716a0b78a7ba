"""What a step leaves on the host is refused by all ranks, before an exchange that some would wait
in; and what it draws on the device is the same on all."""

from typing import Any

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


class Redrawn(Deaf):
    """Draws its tables when the fit starts, and one number more."""

    def on_fit_start(self) -> None:
        torch.manual_seed(3)
        self.ebc.reset_parameters()
        self.next_number = float(torch.rand((), device=self.device))


CASES: dict[type, tuple[int, str]] = {
    LengthsOnHost: (1, "lengths"),
    WeightsOnHost: (3, "weights"),
    IdsOnHost: (1, "ids"),
    IdsOnHostOfOneRank: (3, "ids"),
}
"""Model -> the depth of prefetching, and what is named."""


def _fit(kind: type, **options: Any) -> Any:
    strategy = {"convert_embeddings": "all", "process_group_backend": "nccl"} | options
    model = seeded(kind, torch.optim.SGD, {"lr": 0.1}, pooling="mean")
    batches = [batch_of(kind, number) for number in range(4)]
    make_trainer(strategy, accelerator="gpu").fit(model, DataLoader(batches, batch_size=None))
    return model


def _fit_at(kind: type, depth: int) -> None:
    _fit(kind, prefetch={"depth": depth})


def test_tensors_that_are_left_on_the_host_are_named_on_every_rank(devices: DeviceRanks) -> None:
    for kind, (depth, name) in CASES.items():
        for seen in devices.call(_fit_at, kind, depth):
            assert f"IdsError: 'ebc' has {name} on cpu, and its tables are on cuda:" in seen.error


def _next_number(sharding_type: str) -> float:
    return _fit(Redrawn, sharding_types=[sharding_type]).next_number


def test_draws_of_a_gpu_go_on_alike_on_ranks_without_rows(devices: DeviceRanks) -> None:
    numbers = []
    for sharding_type in ("table_wise", "column_wise", "row_wise"):
        for seen in devices.call(_next_number, sharding_type):
            assert not seen.error
            numbers.append(seen.result)
    assert len(set(numbers)) == 1
