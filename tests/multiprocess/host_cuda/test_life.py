"""What comes after a fit on CUDA devices in host memory: other strategies, other ranks, machines
without a GPU."""

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
from tests.support.host_cuda.matrix import CASES, STRATEGIES, Case, batches_of, module_of
from tests.support.host_cuda.runs import DeviceRanks, device_ranks
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import DEFAULTS

pytestmark = pytest.mark.slow

CLOSE = {"atol": 1e-6, "rtol": 1e-6}
KINDS = {
    "tables": CASES["bags, Adagrad"],
    "fsdp": CASES["fsdp_tuned"],
    "pipeline": CASES["pipeline_parallel"],
}
OTHERS = [("tables", "fsdp"), ("tables", "pipeline"), ("fsdp", "tables"), ("pipeline", "ddp")]


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


def fit_under(case: Case, other: str) -> tuple[str, set[str]]:
    """Fit a case, then by another strategy, then as before; returns what the other said, and where
    the module was."""
    module = module_of(case)

    def fit(strategy: Any) -> None:
        trainer_of(strategy, "gpu", max_steps=2).fit(module, batches_of(case))

    fit(STRATEGIES[case.strategy](**case.options))
    refusal = ""
    try:
        fit(STRATEGIES[other]())
    except Exception as error:
        refusal = f"{type(error).__name__}: {error}"
    places = {parameter.device.type for parameter in module.parameters()}
    fit(STRATEGIES[case.strategy](**case.options))
    return refusal, places


@pytest.mark.parametrize(("kind", "other"), OTHERS, ids="-".join)
def test_a_module_that_another_strategy_refuses_stays_on_its_devices(
    devices: DeviceRanks, kind: str, other: str
) -> None:
    for refusal, places in results_of(devices, fit_under, KINDS[kind], other):
        assert refusal.startswith("ConfigError: ")
        assert "an earlier run under" in refusal
        assert "cuda" in places
        assert "cpu" not in places


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
        actual = {
            "one device": results_of(device, fit_and_save, "gpu", str(tmp_path / "one"), saved)[0]
        }
    with device_ranks(4) as more:
        actual["four devices"] = results_of(
            more, fit_and_save, "gpu", str(tmp_path / "four"), saved
        )[0]
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
