"""Checkpoints that are folders reach MLflow and W&B as files do, and come back from there."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import tracked_runs as runs
from tests.support.click_model import EvaluatedModel
from tests.support.installing import install
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def packages(request: pytest.FixtureRequest) -> str:
    """The folder of the packages; skipped where the index cannot be reached."""
    folder = Path(request.config.cache.mkdir("tracking")) / "-".join(runs.PACKAGES).replace(
        "==", "-"
    )
    if problem := install(folder, runs.PACKAGES):
        pytest.skip(f"the package index cannot be reached: {problem}")
    return str(folder)


@pytest.mark.parametrize(
    ("log_model", "checkpoint"),
    [(True, {"distributed": True}), ("all", {"distributed": True, "async_save": True})],
    ids=["at the end", "at each save, written by a thread"],
)
def test_folders_are_uploaded_as_files_are(
    log_model: Any, checkpoint: dict[str, Any], tmp_path: Path, packages: str
) -> None:
    files, folders = tmp_path / "files", tmp_path / "folders"
    run_on_ranks(runs.fit, 2, packages, str(files), log_model, {"distributed": False})
    weights, _ = run_on_ranks(runs.fit, 2, packages, str(folders), log_model, checkpoint)[0]
    runs.use(packages, str(tmp_path))
    for item, read, number in (
        ("mlflow", runs.in_mlflow, {True: 2, "all": 4}),
        ("wandb", runs.in_wandb, {True: 2, "all": 6}),
    ):
        uploaded, expected = read(folders), read(files)
        assert len(expected) == number[log_model]
        assert [(item.aliases, item.metadata) for item in uploaded] == [
            (item.aliases, item.metadata) for item in expected
        ]
        assert all(len(item.files) == 8 for item in uploaded)
        best = [item for item in uploaded if "best" in item.aliases]
        last = runs.download(best[-1], tmp_path / item / "last")
        loaded = EvaluatedModel.load_from_checkpoint(
            last, optimizer=torch.optim.SGD, options={"lr": 1.0}
        )
        assert all(torch.equal(loaded.state_dict()[name], value) for name, value in weights.items())
        if log_model == "all":
            first = runs.download(best[0], tmp_path / item / "first")
            resumed, steps = run_on_ranks(
                runs.fit, 2, packages, str(tmp_path / item), False, checkpoint, str(first)
            )[0]
            assert steps == 10
            assert all(torch.equal(resumed[name], value) for name, value in weights.items())
