"""A checkpoint that a thread writes is complete though another rank fails in the meantime."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_distrec import TunedDDPStrategy
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_on_ranks
from tests.support.trainers import DEFAULTS


class Fails(BoringModel):
    """Saves after its first step; rank 1 raises in the second."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path, self.more = path, nn.Parameter(torch.ones(2**20))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.trainer.save_checkpoint(self.path)
            if rank_and_num_ranks()[0] == 1:
                raise ValueError("on purpose")
        return super().training_step(batch, batch_idx)["loss"] + self.more.sum() * 0


def _fit(path: str) -> None:
    # 4 MiB at this rate take longer than a rank is left that waits for one which has failed.
    checkpoint = {"async_save": True, "async_bytes_per_second": "400KB/s"}
    trainer = Trainer(strategy=TunedDDPStrategy(checkpoint=checkpoint), devices=2, **DEFAULTS)
    trainer.fit(Fails(path))


@pytest.mark.slow
def test_a_file_in_flight_is_complete_though_another_rank_fails(tmp_path: Path) -> None:
    path = tmp_path / "it.ckpt"
    with pytest.raises(RankFailed, match="ValueError: on purpose"):
        run_on_ranks(_fit, 2, str(path))
    assert torch.load(path)["state_dict"]["more"].sum() == 2**20
