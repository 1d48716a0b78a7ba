"""`fsdp_tuned` with `offload`, on CUDA devices in host memory; matrix.py has its numbers."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.distributed.tensor import DTensor

from lightning_distrec import TunedFSDPStrategy
from lightning_distrec.errors import UnsupportedError
from lightning_distrec.strategies.fully_sharded.fsdp_options import FSDPOptions, choose_dtypes
from tests.support.dense_models import WIDTH, BareAndTied, loader
from tests.support.host_cuda.runs import DeviceRanks
from tests.support.ranks import rank_and_num_ranks
from tests.support.trainers import DEFAULTS


class Watched(BareAndTied):
    """Sees where its parameters, their gradients and its optimizer's state are."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        values = [
            value for state in optimizer.state.values() for value in state.values() if value.dim()
        ]
        gradients = [parameter.grad for parameter in self.parameters()]
        sharded = [
            value
            for value in [*self.parameters(), *gradients, *values]
            if isinstance(value, DTensor)
        ]
        self.places = {value.to_local().device.type for value in sharded}


class Drawn(Watched):
    """Draws a layer at the end."""

    def on_train_end(self) -> None:
        torch.manual_seed(3)
        torch.nn.init.normal_(self.out.weight)


def _live(folder: Path) -> dict[str, Any]:
    """Return what a copy of the module, the drawn layer, and the module after `unshard` have."""
    pl.seed_everything(5)
    model, (rank, num_ranks) = Drawn(), rank_and_num_ranks()
    options: dict[str, Any] = {"min_num_parameters": 20, "process_group_backend": "nccl"}
    strategy = TunedFSDPStrategy(offload=True, **options)
    changes = {"accelerator": "gpu", "devices": num_ranks, "default_root_dir": folder}
    pl.Trainer(strategy=strategy, **(DEFAULTS | changes)).fit(model, loader(rank, num_ranks))
    copied, inputs = copy.deepcopy(model), torch.ones(4, WIDTH, device=strategy.root_device)
    with torch.no_grad():
        same = torch.equal(copied(inputs), model(inputs))
    places = {p.to_local().device.type for p in copied.parameters() if isinstance(p, DTensor)}
    strategy.unshard()
    return {"same": same, "places": places | model.places, "drawn": model.out.weight.detach()}


@pytest.mark.slow
def test_a_module_on_the_host_is_trained_copied_drawn_and_unsharded(
    devices: DeviceRanks, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    expected = torch.nn.init.normal_(torch.empty(1, WIDTH))
    for rank, seen in enumerate(devices.call(_live, tmp_path)):
        assert not seen.error, seen.error
        assert seen.hazards == []
        assert seen.result["same"]
        assert seen.result["places"] == {"cpu"}
        assert rank or torch.equal(seen.result["drawn"], expected)


def test_loss_scaling_is_refused_for_gradients_on_the_host() -> None:
    options = FSDPOptions(offload=True)
    with pytest.raises(
        UnsupportedError, match="offload with .*16-mixed.*GradScaler.*Use 'bf16-mixed'"
    ):
        choose_dtypes(options, "16-mixed")
    assert choose_dtypes(options, "bf16-mixed").param == torch.bfloat16
