"""A hook that draws tables again takes the same random numbers on all ranks, also where none of the
rows are."""

import torch
from torch.utils.data import DataLoader

from tests.support.click_model import seeded
from tests.support.followed_fits import Deaf, batch_of
from tests.support.host_cuda.runs import DeviceRanks
from tests.support.trainers import make_trainer


class Redrawn(Deaf):
    """Draws its tables when the fit starts, and one number more."""

    def on_fit_start(self) -> None:
        torch.manual_seed(3)
        self.ebc.reset_parameters()
        self.next_number = float(torch.rand((), device=self.device))


def _next_number(sharding_type: str) -> float:
    model = seeded(Redrawn, torch.optim.SGD, {"lr": 0.1}, pooling="mean")
    strategy = {"sharding_types": [sharding_type], "process_group_backend": "nccl"}
    batches = DataLoader([batch_of(Redrawn, 0)], batch_size=None)
    make_trainer(strategy, accelerator="gpu").fit(model, batches)
    return model.next_number


def test_draws_of_a_gpu_go_on_alike_on_ranks_without_rows(devices: DeviceRanks) -> None:
    numbers = []
    for sharding_type in ("table_wise", "column_wise", "row_wise"):
        for seen in devices.call(_next_number, sharding_type):
            assert not seen.error
            numbers.append(seen.result)
    assert len(set(numbers)) == 1
