"""Tables whose rows are on the host, with a cache on the GPU, have the numbers of tables on the
GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader

from tests.gpu.device import num_ranks
from tests.gpu.marks import needs_gpu
from tests.support.click_model import EvaluatedModel, make_batch, seeded
from tests.support.ranks import rank_and_num_ranks, run_on_ranks
from tests.support.trainers import make_trainer

pytestmark = needs_gpu

STEPS = 10


def fit_and_test(kernel: str, folder: Path, average: bool) -> Any:
    """Save, train on, and test with the saved rows; returns what was logged, and the weights."""
    model = seeded(EvaluatedModel, torch.optim.SGD, {"lr": 0.1})
    strategy = {"sharding_types": ["row_wise"], "tables": {"*": {"compute_kernels": [kernel]}}}
    callbacks: list[Any] = [EMAWeightAveraging(decay=0.9)] if average else []
    batches = [make_batch(1000 * step + rank_and_num_ranks()[0]) for step in range(STEPS)]
    trainer = make_trainer(
        strategy, accelerator="gpu", callbacks=callbacks, default_root_dir=folder
    )
    trainer.fit(model, DataLoader(batches, batch_size=None))
    trainer.save_checkpoint(folder / "first.ckpt")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, DataLoader(batches, batch_size=None))
    actual = trainer.test(
        model, DataLoader(batches, batch_size=None), ckpt_path=str(folder / "first.ckpt")
    )
    return actual, {name: value.cpu() for name, value in model.final_state.items()}


@pytest.mark.parametrize("average", [False, True])
def test_rows_that_are_loaded_after_a_fit_are_those_that_are_tested(
    tmp_path: Path, average: bool
) -> None:
    cached = run_on_ranks(
        fit_and_test, num_ranks(), "fused_uvm_caching", tmp_path / "a", average, timeout_seconds=120
    )
    plain = run_on_ranks(
        fit_and_test, num_ranks(), "fused", tmp_path / "b", average, timeout_seconds=120
    )
    for (actual, weights), (expected, plain_values) in zip(cached, plain, strict=True):
        assert actual[0]["val_loss"] == pytest.approx(expected[0]["val_loss"], abs=1e-6)
        for name, value in plain_values.items():
            torch.testing.assert_close(weights[name], value, atol=1e-6, rtol=1e-5, msg=name)
