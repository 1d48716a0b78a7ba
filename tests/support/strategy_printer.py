"""A callback for runs of the console script that prints what it was run with."""

import lightning.pytorch as pl
from typing_extensions import override


class PrintsStrategy(pl.Callback):
    """Prints the strategy's class when training begins."""

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        print(f"trained by {type(trainer.strategy).__name__}", flush=True)
