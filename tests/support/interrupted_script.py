"""A training script that only a signal ends. python -m tests.support.interrupted_script STRATEGY
[DEVICES]"""

import sys
import time
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_distrec  # noqa: F401  registers the strategies
from tests.support.launched_script import Clicks, Numbered

READY = "AT STEP 3"


class Endless(Clicks):
    """Tells when it trains."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.05)
        if self.global_step == 3:
            print(f"{READY} of rank {self.global_rank}", flush=True)
        return super().training_step(batch, batch_idx)


def main(strategy: str, *devices: str) -> None:
    """Train until a signal comes."""
    pl.seed_everything(1)
    options: dict[str, Any] = {"devices": int(devices[0])} if devices else {}
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(Endless(), DataLoader(Numbered(), batch_size=2, shuffle=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
