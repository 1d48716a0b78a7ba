"""What comes after a fit on CUDA devices in host memory: other ranks, machines without a GPU."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lightning_distrec.serving.answer import Server
from lightning_distrec.serving.artifact import export_for_serving
from lightning_distrec.serving.export_checkpoint import export
from tests.support.click_model import EvaluatedModel, rank_loader, seeded
from tests.support.embedding_models import TwoTower, loader, pairs
from tests.support.host_cuda.matrix import STRATEGIES
from tests.support.host_cuda.runs import DeviceRanks, device_ranks
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS

pytestmark = pytest.mark.slow

CLOSE = {"atol": 1e-6, "rtol": 1e-6}


def results_of(ranks: DeviceRanks, function: Any, *args: Any) -> list[Any]:
    """Return what each rank returned, without error and hazard."""
    per_rank = ranks.call(function, *args)
    for seen in per_rank:
        assert not seen.error, seen.error
        assert seen.hazards == []
    return [seen.result for seen in per_rank]


def trainer_of(strategy: Any, accelerator: str, **settings: Any) -> pl.Trainer:
    """Return a Trainer of all ranks."""
    fixed = DEFAULTS | {"accelerator": accelerator, "devices": rank_and_num_ranks()[1]}
    return pl.Trainer(strategy=strategy, **(fixed | settings))


def fit_and_save(accelerator: str, path: str, earlier: str | None = None) -> dict[str, Tensor]:
    """Train one epoch, after that of an earlier run, and save; returns the whole state."""
    module = seeded(EvaluatedModel, torch.optim.Adagrad, {"lr": 0.1})
    # the same on each rank: numbers do not depend on how many there are
    batches = rank_loader(4, 0)
    strategy = STRATEGIES["tables"](checkpoint={"distributed": True})
    trainer = trainer_of(strategy, accelerator, max_epochs=1 if earlier is None else 2)
    trainer.fit(module, batches, ckpt_path=earlier)
    trainer.save_checkpoint(path)
    return {key: value.cpu() for key, value in strategy.full_state_dict().items()}


def test_checkpoints_of_devices_are_resumed_on_cpus_and_on_other_numbers_of_ranks(
    devices: DeviceRanks, tmp_path: Path
) -> None:
    run_on_warm_ranks(fit_and_save, 2, "cpu", str(tmp_path / "cpu.ckpt"))
    (expected, _) = run_on_warm_ranks(
        fit_and_save, 2, "cpu", str(tmp_path / "unused"), str(tmp_path / "cpu.ckpt")
    )
    saved = str(tmp_path / "gpu.ckpt")
    trained, _ = results_of(devices, fit_and_save, "gpu", saved)
    assert not torch.equal(
        trained["ebc.embedding_bags.wide.weight"], expected["ebc.embedding_bags.wide.weight"]
    )
    with device_ranks(1) as device:
        (one,) = results_of(device, fit_and_save, "gpu", str(tmp_path / "one"), saved)
    actual = {"one device": one}
    actual["two CPUs"] = run_on_warm_ranks(fit_and_save, 2, "cpu", str(tmp_path / "cpus"), saved)[0]
    for name, state in actual.items():
        torch.testing.assert_close(
            state, expected, **CLOSE, msg=lambda text, name=name: f"{name}: {text}"
        )
    export(Path(saved), tmp_path / "weights.safetensors")
    torch.testing.assert_close(load_file(tmp_path / "weights.safetensors"), trained, atol=0, rtol=0)


def fit_and_serve(accelerator: str, folder: str) -> Tensor | None:
    """Train, unshard, export for serving; returns what the module answers on the host."""
    pl.seed_everything(3)
    module, rank = TwoTower(), rank_and_num_ranks()[0]
    strategy = STRATEGIES["tables"](convert_embeddings="all")
    trainer_of(strategy, accelerator).fit(module, loader([pairs(step, rank) for step in range(4)]))
    strategy.unshard()
    if rank:
        return None
    assert {value.device.type for value in module.state_dict().values()} == {"cpu"}
    batch = pairs(9, 0)
    export_for_serving(module, batch, Path(folder))
    answer: Tensor = module.eval()(*batch).detach()
    return answer


def test_a_module_that_was_trained_on_devices_is_served_on_a_cpu(
    devices: DeviceRanks, tmp_path: Path
) -> None:
    expected, _ = run_on_warm_ranks(fit_and_serve, 2, "cpu", str(tmp_path / "cpu"))
    actual, _ = results_of(devices, fit_and_serve, "gpu", str(tmp_path / "gpu"))
    torch.testing.assert_close(actual, expected, **CLOSE)
    users, items = pairs(9, 0)
    answer = Server(tmp_path / "gpu").answer({"0": users, "1": items})
    torch.testing.assert_close(answer, expected, **CLOSE)
