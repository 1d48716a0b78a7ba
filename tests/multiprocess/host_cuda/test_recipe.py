"""A recipe for GPUs trains on CUDA devices in host memory, as its user would start it."""

import re
import sys
from pathlib import Path

import pytest

from tests.support.console import finished
from tests.support.host_cuda.runs import ROOT, variables_or_skip


@pytest.mark.slow
def test_the_first_recipe_for_gpus_trains_on_two_devices(tmp_path: Path) -> None:
    options = ["--trainer.devices", "2", "--trainer.logger.init_args.save_dir", str(tmp_path)]
    command = [
        *("-m", "lightning_distrec", "fit", "--config", "recipes/movielens_dlrm/gpu.yaml"),
        *options,
    ]
    # By the way in that a user takes, which prints hazards at the end.
    command = [sys.executable, "-m", "tests.support.host_cuda", "--devices", "2", *command]
    environ = variables_or_skip(devices=2)
    done = finished(command, ROOT, env=environ)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    auroc = re.search(r"this model +(0\.\d+)", output)
    assert auroc is not None, output[-4000:]
    assert float(auroc[1]) > 0.72
    assert "Hazards between streams: 0\n" in output
