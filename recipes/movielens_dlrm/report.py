"""Prints the result after training and draws its curves."""

import csv
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from recipes.movielens_dlrm.baseline import Scores

CURVES = {"train_loss": "training loss", "val_auroc": "validation AUROC", "val_log_loss": "validation log-loss"}


class Report(pl.Callback):
    """Prints how the model compares with the mean-rates baseline and draws the curves to curves.png.

    The file is written next to the CSVLogger's metrics.csv; without a CSVLogger there is none. The baseline is the data
    module's `baseline("val")`.
    """

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print and draw on rank 0. No collective is called, so no rank waits for another here."""
        if not trainer.is_global_zero:
            return
        if trainer.progress_bar_callback is not None:
            # An active progress bar would be drawn again below the lines.
            trainer.progress_bar_callback.teardown(trainer, pl_module, "fit")
        # Lightning sets this attribute at run time.
        baseline = trainer.datamodule.baseline("val")  # type: ignore[attr-defined]
        print("\n" + "\n".join([*score_lines(trainer, baseline), *output_lines(trainer, baseline)]), flush=True)


def score_lines(trainer: pl.Trainer, baseline: Scores) -> list[str]:
    """Return a small table: the validation metrics of the last epoch and of the baseline."""
    measured = {name: float(value) for name, value in trainer.callback_metrics.items()}
    if "val_auroc" not in measured:
        return ["Validation did not run, so the model cannot be compared with the baseline."]
    return [
        f"Validation after {trainer.current_epoch} epochs   AUROC   log-loss",
        f"  this model                  {measured['val_auroc']:.4f}  {measured['val_log_loss']:.4f}",
        f"  mean-rates baseline         {baseline.auroc:.4f}  {baseline.log_loss:.4f}",
    ]


def output_lines(trainer: pl.Trainer, baseline: Scores) -> list[str]:
    """Draw the curves if there is a CSVLogger, and return lines that name all files."""
    lines = []
    logger = next((logger for logger in trainer.loggers if isinstance(logger, CSVLogger)), None)
    if logger is None:
        lines.append("The curves were not drawn: the Trainer has no CSVLogger, whose metrics.csv they need.")
    else:
        # Lightning writes the last rows when it closes the logger, after this hook.
        logger.save()
        folder = Path(logger.log_dir)
        draw_curves(read_curves(folder / "metrics.csv"), baseline, folder / "curves.png")
        lines += [
            f"Outputs in {folder}:",
            "  metrics.csv  all logged metrics",
            "  curves.png   curves of loss and metrics; the baseline is dashed",
        ]
    checkpoint = trainer.checkpoint_callback
    if isinstance(checkpoint, ModelCheckpoint) and checkpoint.best_model_path:
        lines.append(f"Best checkpoint: {checkpoint.best_model_path}")
    return lines


def read_curves(file: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the (epoch, value) points of each curve; epochs are counted from 1.

    file: written by CSVLogger; a row holds some of the columns and leaves the others empty.
    """
    with file.open(newline="") as rows:
        table = list(csv.DictReader(rows))
    return {name: [(int(row["epoch"]) + 1, float(row[name])) for row in table if row.get(name)] for name in CURVES}


def draw_curves(curves: dict[str, list[tuple[int, float]]], baseline: Scores, file: Path) -> None:
    """Draw one panel per curve into a PNG file, with the baseline dashed."""
    dashed = {"val_auroc": baseline.auroc, "val_log_loss": baseline.log_loss}
    # A Figure without pyplot needs no display and does not change the caller's plots.
    figure = Figure(figsize=(4 * len(CURVES), 3.2), layout="constrained")
    panels = figure.subplots(1, len(CURVES))
    for panel, (name, title) in zip(panels, CURVES.items(), strict=True):
        epochs, values = [epoch for epoch, _ in curves[name]], [value for _, value in curves[name]]
        panel.plot(epochs, values, marker="o", label="model")
        if name in dashed:
            panel.axhline(dashed[name], linestyle="--", color="gray", label="mean-rates baseline")
        panel.set(title=title, xlabel="epoch")
        panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(file, dpi=120)
