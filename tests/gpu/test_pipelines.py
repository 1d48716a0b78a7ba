"""A chain in stages on the devices of this machine, NCCL between them, has the numbers of one
process on a CPU.

Gloo sends from the host's memory only, so that two stages cannot share a GPU.
"""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor
from torch.nn import functional

from lightning_distrec import PipelineParallelStrategy
from tests.gpu.device import ACCELERATOR, DEVICE, num_ranks
from tests.gpu.marks import runs_here
from tests.support.chain_models import CHAINS, Sequence
from tests.support.dense_models import whole_batches
from tests.support.ranks import CallsOnRanks
from tests.support.trainers import DEFAULTS

pytestmark = [runs_here, pytest.mark.skipif(num_ranks() < 2, reason="a pipeline needs two devices")]

STEPS = 6
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpipe": ("Sequence", {"microbatches": 2}),
    "1f1b": ("Transformer", {"schedule": "1f1b"}),
    "metrics": ("Measured", {"schedule": "1f1b"}),
}


class DropsOut(Sequence):
    """Drops out behind its chain."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = functional.mse_loss(functional.dropout(self(batch[0]), 0.5), batch[1])
        self.log("loss", loss, sync_dist=True)
        self.losses.append(float(loss.detach()))
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        """Its losses are kept already, on the last stage."""


def _settings(**settings: Any) -> dict[str, Any]:
    return DEFAULTS | {"limit_train_batches": STEPS, "limit_val_batches": 2} | settings


def _fit(kind: type, options: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Return losses, what was validated, the weights, and where logged values are when training
    ends."""
    pl.seed_everything(5)
    model = kind()
    strategy = PipelineParallelStrategy(**options)
    devices: set[str] = set()
    # Lightning moves them to the host when the fit is over.
    look = LambdaCallback(
        on_train_end=lambda trainer, _: devices.update(
            v.device.type for v in trainer.callback_metrics.values()
        )
    )
    settings = _settings(accelerator=ACCELERATOR, callbacks=[look], **settings)
    pl.Trainer(strategy=strategy, devices=2, **settings).fit(model)
    return {
        "losses": (model.losses, model.validated),
        "weights": {name: value.cpu() for name, value in strategy.full_state_dict().items()},
        "devices": devices,
    }


def _rounded(kind: type) -> dict[str, Any]:
    return _fit(kind, {"schedule": "1f1b"}, precision="bf16-true")


@pytest.fixture(scope="module")
def results() -> CallsOnRanks:
    """What each case gave on each rank."""
    calls: dict[str, Any] = {
        name: (_fit, CHAINS[kind], options) for name, (kind, options) in CASES.items()
    }
    calls |= {
        "dropout": (_fit, DropsOut, {"schedule": "1f1b"}),
        "rounded": (_rounded, CHAINS["Sequence"]),
    }
    return CallsOnRanks(calls, 2)


@pytest.mark.parametrize("name", CASES)
def test_losses_and_weights_are_those_of_one_process(results: Any, name: str) -> None:
    pl.seed_everything(5)
    model = CHAINS[CASES[name][0]]()
    pl.Trainer(**_settings()).fit(model, whole_batches(1), whole_batches(1))
    per_rank = results[name]
    for actual in per_rank:
        for values, expected in zip(actual["losses"], (model.losses, model.validated), strict=True):
            assert values == pytest.approx(expected, rel=1e-4, abs=1e-5)
        assert actual["devices"] == {DEVICE}, "NCCL reduces what is logged with sync_dist"
    weights = per_rank[0]["weights"]
    for key, value in model.state_dict().items():
        torch.testing.assert_close(weights[key], value, atol=1e-5, rtol=1e-4, msg=key)


def test_dropout_behind_the_chain_and_16_bit_losses_are_no_reason_to_refuse(results: Any) -> None:
    assert len(results["dropout"][1]["losses"][0]) >= STEPS
    first, last = (result["losses"][0] for result in results["rounded"])
    assert first == last
    assert len(first) == STEPS
