"""Options of the strategies, set in a YAML: real ranks train the recipe with them, to the losses of
the plain run."""

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.console import fit_by_console

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "recipes/next_character/cpu.yaml"
LAYERS = ["TransformerEncoderLayer"]
SQUEEZED = {"powersgd": {"matrix_rank": 1, "start_step": 0}}

CASES: dict[str, tuple[str, dict[str, Any], str, float]] = {
    "ddp recomputes": (
        "TunedDDPStrategy",
        {"activation_checkpointing": "1MB"},
        "activation checkpointing: 2 of 2 layers recompute",
        0.0,
    ),
    "ddp squeezes": (
        "TunedDDPStrategy",
        SQUEEZED,
        "ddp_tuned: from step 0 on, PowerSGD sends",
        0.2,
    ),
    "fsdp recomputes": (
        "TunedFSDPStrategy",
        {"wrap": LAYERS, "activation_checkpointing": True},
        "",
        1e-4,
    ),
    "fsdp in bf16": (
        "TunedFSDPStrategy",
        {"wrap": LAYERS, "param_dtype": "bf16", "reduce_dtype": "bf16"},
        "",
        0.05,
    ),
    "stages": (
        "PipelineParallelStrategy",
        {"schedule": "1f1b", "microbatches": 8, "split": ["blocks.1"]},
        "pipeline_parallel: 'blocks' in 2 stages, 1f1b, 8 micro-batches",
        1e-4,
    ),
}
"""Case -> the strategy, its options, what the log says, and how far losses may be from those of the
plain run."""


def _losses(
    folder: Path, strategy: str, options: dict[str, Any], message: str, batch_size: int
) -> list[float]:
    selection = {
        "class_path": f"lightning_distrec.{strategy}",
        "init_args": options | {"timeout_seconds": 60.0},
    }
    folder.mkdir()
    (folder / "strategy.yaml").write_text(
        yaml.safe_dump({"trainer": {"strategy": selection, "callbacks": []}})
    )
    done = fit_by_console(
        *("--config", RECIPE, "--config", str(folder / "strategy.yaml")),
        *(f"--trainer.logger.init_args.save_dir={folder}", f"--data.batch_size={batch_size}"),
        *(
            "--trainer.max_epochs=1",
            "--trainer.limit_train_batches=6",
            "--trainer.limit_val_batches=4",
        ),
    )
    assert message in done.stdout + done.stderr
    with open(next(folder.rglob("metrics.csv"))) as file:
        rows = list(csv.DictReader(file))
    return [
        float(row[name]) for name in ("train_loss", "val_loss") for row in rows if row.get(name)
    ]


@pytest.mark.slow
def test_runs_with_options_have_the_losses_of_the_plain_run(tmp_path: Path) -> None:
    plain = _losses(tmp_path / "plain", "TunedDDPStrategy", {}, "", 16)
    assert len(plain) == 2
    for case, (strategy, options, message, most) in CASES.items():
        # All ranks of a pipeline have the same batch, which is that of both ranks in the plain run.
        size = 32 if strategy == "PipelineParallelStrategy" else 16
        losses = _losses(tmp_path / case, strategy, options, message, size)
        assert losses == pytest.approx(plain, abs=most, rel=0), case
        assert (losses != plain) == bool(most), case
