"""Every recipe's cpu.yaml trains as its README says, in a copy of the recipe; figures in READMEs
are from full runs."""

import csv
import re
import sys
from pathlib import Path

import pytest
import yaml

from lightning_distrec.cli.main import main
from lightning_distrec.cli.recipes import find_parts, recipe_names, recipes_folder
from recipes.movielens.folder import fetch_movielens_100k
from tests.support.console import finished, fit_by_console

ROOT = Path(__file__).resolve().parents[2]
NAMES = recipe_names(recipes_folder())
SMALLER = {
    "criteo_dlrm": ["--data.init_args.num_examples=65536", "--data.init_args.batch_size=512"],
    "multi_task": ["--data.init_args.num_examples=65536", "--data.init_args.batch_size=512"],
    "convnet": ["--data.init_args.num_train=512", "--data.init_args.num_val=128"],
}


@pytest.fixture(scope="module")
def movielens() -> Path:
    folder = ROOT / "data" / "movielens-100k"
    fetch_movielens_100k(folder)
    return folder


def _serves(folder: Path, name: str, checkpoint: Path) -> None:
    """Check that the recipe's best checkpoint answers from a folder of its own as the module
    does."""
    arguments = ["--format", "torch.export", "--config", f"recipes/{name}/cpu.yaml"]
    console = str(Path(sys.executable).parent / "lightning-distrec")
    for command in (
        [console, "export", str(checkpoint), "served", *arguments],
        [sys.executable, "served/serve.py", "--check"],
    ):
        done = finished(command, folder)
        assert done.returncode == 0, done.stderr[-3000:]
    # Scores of some ten, in float32.
    assert float(done.stdout.split(": ")[1].split(" ")[0]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_copy_of_the_recipe_trains(name: str, movielens: Path, tmp_path: Path) -> None:
    assert main(["recipes", "copy", name, "--into", str(tmp_path)]) == 0
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "movielens-100k").symlink_to(movielens)
    arguments = [
        "--config",
        f"recipes/{name}/cpu.yaml",
        "--trainer.max_epochs=1",
        "--trainer.log_every_n_steps=1",
        *SMALLER.get(name, []),
    ]
    done = fit_by_console(*arguments, folder=tmp_path)
    assert "2 ranks on 1 node" in done.stderr
    outputs = tmp_path / "outputs" / name / "version_0"
    assert f"Outputs in {outputs.relative_to(tmp_path)}" in done.stdout
    assert (outputs / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (outputs / "checkpoints" / "best.ckpt").exists()
    with (outputs / "metrics.csv").open(newline="") as rows:
        losses = [
            float(value)
            for row in csv.DictReader(rows)
            for key, value in row.items()
            if "train_loss" in key and value
        ]
    assert losses
    if name not in ("convnet", "next_character"):
        _serves(tmp_path, name, outputs / "checkpoints" / "best.ckpt")
    assert all(0 < loss < 10 for loss in losses)


@pytest.mark.parametrize("name", NAMES)
def test_each_recipe_has_what_a_reader_expects(name: str) -> None:
    folder = ROOT / "recipes" / name
    for file in ("README.md", "cpu.yaml", "gpu.yaml", "model.py"):
        assert (folder / file).is_file(), file
    assert (folder / "slurm.yaml").is_file() or (folder / "slurm.sh").is_file()
    readme = (folder / "README.md").read_text()
    assert f"recipes/{name}/cpu.yaml" in readme
    assert "## Results" in readme
    files = [
        file
        for part in find_parts(ROOT / "recipes", name)
        for file in (ROOT / "recipes" / part).rglob("*.py")
    ]
    shown = re.findall(
        r'self\.log\(\s*f?"([^"]+)"[^)]*prog_bar=True', "".join(file.read_text() for file in files)
    )
    assert shown
    for metric in shown:  # the bar cuts longer names, on 80 columns
        assert len(metric.replace("{split}", "val")) <= 16, metric
    for file in ("cpu.yaml", "gpu.yaml"):
        trainer = yaml.safe_load((folder / file).read_text())["trainer"]
        saved = [
            first["init_args"].get("every_n_train_steps")
            for first in trainer["callbacks"]
            if "init_args" in first
        ]
        assert any(saved), f"{file}: a restarted job resumes from a step, not from an epoch"
