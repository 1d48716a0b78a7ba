"""A callback of all recipes: prints how the model compares with its baselines, and draws the
curves."""

import csv
from collections.abc import Mapping
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

Baselines = dict[str, dict[str, float]]
"""Name of a baseline or bound -> metric -> its value."""


class Report(pl.Callback):
    """Prints the last value of each metric beside its baselines, and draws its curve to curves.png.

    The file is written next to the CSVLogger's metrics.csv; without a CSVLogger there is none.
    Baselines come from the data module's method `baselines()`, where it has one: {"name":
    {"val_auroc": 0.7}}.
    """

    def __init__(self, metrics: dict[str, str]) -> None:
        """metrics: logged name -> title of its curve. Those that begin with "val_" are printed,
        too."""
        self.metrics = metrics

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print and draw on rank 0. No collective is called, so no rank waits for another here."""
        if not trainer.is_global_zero:
            return
        if trainer.progress_bar_callback is not None:
            # An active progress bar would be drawn again below the lines.
            trainer.progress_bar_callback.teardown(trainer, pl_module, "fit")
        # Lightning sets `datamodule` at run time.
        find = getattr(getattr(trainer, "datamodule", None), "baselines", dict)
        baselines: Baselines = find()
        lines = [
            *score_lines(trainer, self.metrics, baselines),
            *output_lines(trainer, self.metrics, baselines),
        ]
        print("\n" + "\n".join(lines), flush=True)


def score_lines(trainer: pl.Trainer, metrics: Mapping[str, str], baselines: Baselines) -> list[str]:
    """Return a small table: the validation metrics of the last epoch, and those of each
    baseline."""
    measured = {name: float(value) for name, value in trainer.callback_metrics.items()}
    names = [name for name in metrics if name.startswith("val_") and name in measured]
    if not names:
        return ["Validation did not run, so the model cannot be compared with the baseline."]
    epochs = "1 epoch" if trainer.current_epoch == 1 else f"{trainer.current_epoch} epochs"
    titles = [metrics[name].removeprefix("validation ") for name in names]
    lines = [f"{f'Validation after {epochs}':<28}  " + "  ".join(f"{title:>8}" for title in titles)]
    for label, values in {"this model": measured, **baselines}.items():
        numbers = [f"{values[name]:.4f}" if name in values else "" for name in names]
        cells = (
            f"{number:>{max(8, len(title))}}" for number, title in zip(numbers, titles, strict=True)
        )
        lines.append(f"  {label:<26}  " + "  ".join(cells).rstrip())
    return lines


def output_lines(
    trainer: pl.Trainer, metrics: Mapping[str, str], baselines: Baselines
) -> list[str]:
    """Draw the curves if there is a CSVLogger, and return lines that name all files."""
    lines = []
    logger = next((logger for logger in trainer.loggers if isinstance(logger, CSVLogger)), None)
    saved = None
    if logger is not None:
        logger.save()  # Lightning writes the last rows when it closes the logger, after this hook
        saved = Path(logger.log_dir) / "metrics.csv"
    if saved is None:
        lines.append(
            "The curves were not drawn: the Trainer has no CSVLogger, whose metrics.csv they need."
        )
    elif not saved.exists():
        # fewer steps than Trainer(log_every_n_steps)
        lines.append("The curves were not drawn: nothing was logged.")
    else:
        folder = saved.parent
        draw_curves(read_curves(saved, metrics), metrics, baselines, folder / "curves.png")
        dashed = "; baselines are dashed" if baselines else ""
        lines += [
            f"Outputs in {folder}:",
            "  metrics.csv  all logged metrics",
            f"  curves.png   curves of loss and metrics{dashed}",
        ]
    checkpoint = trainer.checkpoint_callback
    if isinstance(checkpoint, ModelCheckpoint) and checkpoint.best_model_path:
        lines.append(f"Best checkpoint: {checkpoint.best_model_path}")
    return lines


def read_curves(file: Path, metrics: Mapping[str, str]) -> dict[str, list[tuple[int, float]]]:
    """Return the (step, value) points of each curve; an epoch may be validated several times.

    file: written by CSVLogger; a row holds some of the columns and leaves the others empty.
    """
    with file.open(newline="") as rows:
        table = list(csv.DictReader(rows))
    return {
        name: [(int(row["step"]) + 1, float(row[name])) for row in table if row.get(name)]
        for name in metrics
    }


def draw_curves(
    curves: Mapping[str, list[tuple[int, float]]],
    metrics: Mapping[str, str],
    baselines: Baselines,
    file: Path,
) -> None:
    """Draw one panel per curve into a PNG file, with the baselines dashed."""
    # A Figure without pyplot needs no display and does not change the caller's plots.
    figure = Figure(figsize=(4 * len(metrics), 3.2), layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for panel, (name, title) in zip(panels, metrics.items(), strict=True):
        steps, values = [step for step, _ in curves[name]], [value for _, value in curves[name]]
        panel.plot(steps, values, marker="o", markersize=4, label="model")
        for number, (label, numbers) in enumerate(baselines.items()):
            if name in numbers:
                panel.axhline(numbers[name], linestyle="--", color=f"C{number + 1}", label=label)
        panel.set(title=title, xlabel="step")
        # One scale for all, on which the only point of an epoch's mean is at its end.
        panel.set_xlim(
            0, 1.05 * max((step for points in curves.values() for step, _ in points), default=1)
        )
        panel.xaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(file, dpi=120)
