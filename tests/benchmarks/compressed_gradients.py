"""Loss curves and bytes of compressed gradients, on the next-character recipe.

    python -m tests.benchmarks.compressed_gradients [STEPS]

Prints a table in Markdown: the validation loss (of the same 40 batches) along a fit of two gloo
ranks, what a rank sends for gradients in a step, and the time of a step.
"""

import io
import statistics
import sys
import time
from contextlib import redirect_stdout
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lightning_distrec import Communication, TunedDDPStrategy
from recipes.next_character.data import ManualDataModule
from recipes.next_character.model import NextCharacter
from tests.support.ranks import rank_and_num_ranks, run_on_ranks
from tests.support.trainers import DEFAULTS

POINTS = 4
CONTENDERS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16": {"comm_dtype": "bf16"},
    "powersgd, matrix_rank 1": {"powersgd": {"matrix_rank": 1, "start_step": 20}},
    "powersgd, matrix_rank 4": {"powersgd": {"matrix_rank": 4, "start_step": 20}},
    "powersgd, matrix_rank 8": {"powersgd": {"matrix_rank": 8, "start_step": 20}},
}


class Curve(Callback):
    """Keeps the validation losses, the seconds of steps, and what the last steps have sent."""

    def __init__(self, sent: Communication) -> None:
        self._sent, self.losses, self.seconds, self.sent_bytes = sent, [], [], 0.0
        self._began = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._before = self._sent.bytes_per_step["dense gradients"] * trainer.global_step
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)
        self.sent_bytes = (
            self._sent.bytes_per_step["dense gradients"] * trainer.global_step - self._before
        )

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.losses.append(float(trainer.callback_metrics["val_loss"]))


def fit(options: dict[str, Any], steps: int) -> tuple[list[float], float, float]:
    """Train on this rank; returns validation losses, bytes of a late step, and its median
    milliseconds."""
    pl.seed_everything(1)
    torch.set_num_threads(1)
    sent = Communication()
    curve = Curve(sent)
    settings: dict[str, Any] = {
        "limit_val_batches": 40,
        "val_check_interval": steps // POINTS,
        "max_steps": steps,
    }
    settings |= {"callbacks": [sent, curve], "devices": rank_and_num_ranks()[1], "max_epochs": -1}
    trainer = pl.Trainer(strategy=TunedDDPStrategy(**options), **DEFAULTS | settings)
    with redirect_stdout(io.StringIO()):
        trainer.fit(NextCharacter(), ManualDataModule())
    return curve.losses, curve.sent_bytes, 1000 * statistics.median(curve.seconds[steps // 2 :])


def main(steps: int) -> None:
    """Print the table."""
    position = [f"step {steps * (point + 1) // POINTS}" for point in range(POINTS)]
    print(
        "| gradients | "
        + " | ".join(position)
        + " | sent per step | step |\n"
        + "| --- " * (POINTS + 3)
        + "|"
    )
    for name, options in CONTENDERS.items():
        losses, sent, milliseconds = run_on_ranks(fit, 2, options, steps)[0]
        shown = " | ".join(f"{loss:.3f}" for loss in losses)
        print(f"| {name} | {shown} | {sent / 1000:.1f} kB | {milliseconds:.1f} ms |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)
