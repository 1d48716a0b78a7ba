"""Weight averages over shards are the averages of the unsharded run; summaries count whole
tables."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    StochasticWeightAveraging,
)
from torch import nn

from lightning_distrec.errors import ShardingError
from tests.support.cases import check, click_case
from tests.support.click_model import (
    ClickModel,
    EvaluatedModel,
    make_batch,
    seeded,
    train_sharded,
)
from tests.support.plain_checkpoints import plain_checkpoint
from tests.support.ranks import run_on_warm_ranks

SGD = (torch.optim.SGD, {"lr": 1.0})


class Averaged(EvaluatedModel):
    """Saves a checkpoint in the middle, to a folder."""

    def __init__(self, *args: Any, folder: str = "") -> None:
        super().__init__(*args)
        self.folder = folder

    def on_train_epoch_start(self) -> None:
        if self.folder and self.current_epoch == 2:
            self.trainer.save_checkpoint(f"{self.folder}/saved.ckpt")


def moving() -> dict[str, Any]:
    return {"max_epochs": 4, "callbacks": [EMAWeightAveraging(decay=0.9)]}


def stochastic() -> dict[str, Any]:
    average = StochasticWeightAveraging(
        swa_lrs=0.5, swa_epoch_start=2, annealing_epochs=2, annealing_strategy="linear"
    )
    return {"max_epochs": 4, "callbacks": [average]}


VALUES: dict[str, Any] = {"steps": 4, "val_steps": 1}


def test_stochastic_averages_are_those_of_the_unsharded_run() -> None:
    check(click_case(EvaluatedModel, SGD, trainer=stochastic, **VALUES))


def test_moving_averages_are_those_of_the_unsharded_run_and_so_are_its_checkpoints(
    tmp_path: Path,
) -> None:
    sharded, whole = str(tmp_path / "sharded"), str(tmp_path / "whole")
    in_one_process = partial(Averaged, *SGD, folder=whole)
    check(click_case(Averaged, SGD, folder=sharded, plain=in_one_process, trainer=moving, **VALUES))
    saved = plain_checkpoint(Path(sharded, "saved.ckpt"))
    expected = torch.load(Path(whole, "saved.ckpt"), weights_only=False)
    for part in ("state_dict", "current_model_state"):
        torch.testing.assert_close(saved[part], expected[part], atol=1e-6, rtol=0.0)


def _copies() -> str:
    model = seeded(ClickModel, *SGD)
    train_sharded(model, 1)
    model.trainer = None
    copied = copy.deepcopy(model)
    assert torch.equal(copied.mlp[0].weight, model.mlp[0].weight)
    assert isinstance(copied.ebc, nn.Module)
    with pytest.raises(ShardingError) as reported:
        copied(make_batch(0))
    return str(reported.value)


def test_a_deep_copy_has_no_rows_and_reports_it_when_it_is_called() -> None:
    assert "its tables hold no rows" in run_on_warm_ranks(_copies, 2)[0]
