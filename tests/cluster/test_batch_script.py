"""The script for sbatch is one that Slurm takes, and that trains."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import LIMIT_SECONDS
from tests.support.slurm import Slurm

COMMAND = [sys.executable, "-m", "lightning_distrec.cli", "slurm"]
CONFIG = """
trainer:
  strategy: torchrec_sharded
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_checkpointing: false
model: tests.support.launched_script.Clicks
data: tests.support.launched_script.Data
"""


def _write(*arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    (folder / "my run").mkdir(exist_ok=True)
    (config := folder / "my run" / "cpu.yaml").write_text(CONFIG)
    command = [*COMMAND, f"--config={config}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)


def test_slurm_runs_it_on_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    out = tmp_path / "run.sh"
    sizes = ("--nodes=2", "--ranks_per_node=1", "--gpus=false", "--cpus_per_rank=2", "--time=10")
    done = _write(*sizes, f"--out={out}", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"Written: {out}. Submit it with: sbatch {out}\n"
    job = slurm.sbatch(out.read_text(), env={"OMP_NUM_THREADS": "1"})
    assert slurm.wait(job) == "COMPLETED", slurm.output(job)
    printed = slurm.output(job)
    assert "Nothing stands in the way" in printed
    assert printed.count("2 ranks on 2 nodes, started by Slurm") == 2, "the doctor's and the training's"
    assert "`Trainer.fit` stopped: `max_epochs=1` reached." in printed
    assert "JobName=my-run" in slurm.scontrol("show", "job", str(job))


def test_what_is_asked_for_is_in_it(tmp_path: Path) -> None:
    done = _write("--nodes=64", "--ranks_per_node=8", "--partition=a", "--account=b", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    for line in ("nodes=64", "ntasks-per-node=8", "gpus-per-node=8", "partition=a", "account=b", "signal=USR1@120"):
        assert f"#SBATCH --{line}\n" in done.stdout
    assert f"fit --config '{tmp_path}/my run/cpu.yaml'" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nodes=0", "--ranks_per_node=1"], "nodes is 0, and must be at least 1"),
        (["--nodes=1", "--ranks_per_node=1", "--time=tomorrow"], "time is 'tomorrow', which Slurm does not know"),
        (["--nodes=1", "--ranks_per_node=1", "--config=none.yaml"], "there is no file none.yaml"),
    ],
)
def test_what_slurm_would_not_take_is_told(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = _write(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert f"lightning-distrec: {said}" in done.stderr
