"""Lightning's callbacks do over sharded tables what they do under DDP."""

from typing import Any

import pytest
from lightning.pytorch.callbacks import (
    EarlyStopping,
)
from torch import Tensor

from tests.support.click_model import (
    EvaluatedModel,
    largest_difference,
    rank_loader,
    seeded,
)
from tests.support.plain_loop import (
    OPTIMIZERS,
    loss_of,
)
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_ddp_trainer, make_trainer

BOTH = {"sharded": make_trainer, "ddp": make_ddp_trainer}


class OwnLosses(EvaluatedModel):
    """Monitors the loss of its own rank."""

    def validation_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.log("val_loss", loss_of(self, batch), batch_size=len(batch["label"]))


def _stopped_early() -> dict[str, dict[str, Any]]:
    rank, _ = rank_and_num_ranks()
    actual: dict[str, dict[str, Any]] = {}
    for name, trainer_of in BOTH.items():
        model = seeded(OwnLosses, *OPTIMIZERS["SGD"])
        stopping = EarlyStopping("val_loss", patience=1, check_on_train_epoch_end=False)
        trainer = trainer_of(max_epochs=30, callbacks=[stopping])
        trainer.fit(model, rank_loader(6, rank), rank_loader(2, rank, first=20))
        actual[name] = {
            "epochs": (trainer.current_epoch, stopping.stopped_epoch),
            "best": float(stopping.best_score),
            "state": model.final_state,
        }
    return actual


def test_all_ranks_stop_early_where_ddp_stops() -> None:
    actual = run_on_warm_ranks(_stopped_early, 2)
    for rank in actual:
        assert rank["sharded"]["epochs"] == rank["ddp"]["epochs"] == actual[0]["ddp"]["epochs"]
        assert rank["sharded"]["best"] == pytest.approx(rank["ddp"]["best"], abs=1e-6)
    sharded, ddp = actual[0]["sharded"], actual[0]["ddp"]
    assert 1 < sharded["epochs"][0] < 30
    assert max(largest_difference(sharded["state"], ddp["state"]).values()) <= 1e-6
