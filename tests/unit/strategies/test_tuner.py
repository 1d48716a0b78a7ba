"""Lightning's Tuner over a step that fails: what the user raised comes out, and the module stays
whole."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.tuner import Tuner

from lightning_distrec import TunedDDPStrategy, TunedFSDPStrategy
from tests.support.trainers import one_process_trainer


class Fails(BoringModel):
    """Runs out of memory in its second step."""

    lr, num_steps = 0.1, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.num_steps += 1
        if self.num_steps == 2:
            raise torch.OutOfMemoryError("on purpose")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("strategy", [TunedDDPStrategy, TunedFSDPStrategy])
def test_a_failed_step_of_lr_find_is_what_is_raised(strategy: Any, tmp_path: Path) -> None:
    module, options = Fails(), {"limit_train_batches": 8}
    trainer = one_process_trainer(strategy(), default_root_dir=tmp_path, **options)
    with pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        Tuner(trainer).lr_find(module, num_training=20)
    assert not list(tmp_path.iterdir())
    again = one_process_trainer(strategy(), **options)
    again.fit(module)
    assert again.global_step == 8
