"""LightningModules of public packages, as they are published, train on two ranks what one process
trains."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import published_modules as published
from tests.support.embedding_models import too_far
from tests.support.ranks import run_on_ranks

pytestmark = pytest.mark.slow
LIMIT = 2e-6
"""Sums in another order differ by 1e-7, which Adam's division by roots of squares makes 1e-6."""


def without_bias_of_keys(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Leave out the bias of attention's keys: softmax cancels it, so that Adam scales up rounding
    errors."""
    return {
        name: value.reshape(3, -1)[[0, 2]] if name.endswith("in_proj_bias") else value
        for name, value in state.items()
    }


@pytest.fixture(scope="module")
def packages(request: pytest.FixtureRequest) -> Path:
    """The folder of the packages; skipped where the index cannot be reached."""
    folder = Path(request.config.cache.mkdir("published_modules"))  # type: ignore[union-attr]
    if problem := published.install(folder):
        pytest.skip(f"the package index cannot be reached: {problem}")
    return folder


@pytest.mark.parametrize("name", published.MODULES)
def test_published_modules_train_recommend_and_export_as_in_one_process(
    name: str, packages: Path, tmp_path: Path
) -> None:
    saved, exported = str(tmp_path / "saved.ckpt"), str(tmp_path / "exported.pt")
    on_ranks = run_on_ranks(published.train, 2, name, str(packages), saved)
    (single,) = run_on_ranks(published.train, 1, name, str(packages))
    command = [sys.executable, "-m", "lightning_distrec", "export", saved, exported]
    command += ["--pickles"] if "TFT" in name else []
    path = os.pathsep.join([*sys.path, *map(str, published.folders(packages))])
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path}, timeout=60)
    assert too_far(torch.load(exported), on_ranks[0]["state"], 0.0) == {}
    expected = without_bias_of_keys(single["state"])
    for rank, result in enumerate(on_ranks):
        assert result["tables"], "nothing was sharded"
        assert too_far(without_bias_of_keys(result["state"]), expected, LIMIT) == {}
        torch.testing.assert_close(
            result["recommended"], single["recommended"], atol=1e-5, rtol=1e-5
        )
        if single["predicted"] is not None:
            torch.testing.assert_close(
                result["predicted"], single["predicted"][rank::2], atol=1e-5, rtol=1e-5
            )
