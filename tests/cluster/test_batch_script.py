"""The script for sbatch is one that Slurm takes, and that trains."""

from pathlib import Path

import pytest

from lightning_distrec.cli.main import main
from tests.support.slurm import Slurm

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


def _write(*arguments: str, folder: Path) -> int:
    (folder / "my run").mkdir(exist_ok=True)
    (config := folder / "my run" / "cpu.yaml").write_text(CONFIG)
    return main(["slurm", f"--config={config}", *arguments])


@pytest.mark.slow
def test_slurm_runs_it_on_two_nodes(slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run.sh"
    sizes = ("--nodes=2", "--ranks-per-node=1", "--gpus=false", "--cpus-per-rank=2", "--time=10")
    assert _write(*sizes, f"--out={out}", folder=tmp_path) == 0
    assert capsys.readouterr().out == f"Wrote {out}. Submit it with: sbatch {out}\n"
    job = slurm.sbatch(out.read_text(), env={"OMP_NUM_THREADS": "1"})
    assert slurm.wait(job) == "COMPLETED", slurm.output(job)
    printed = slurm.output(job)
    assert "No problems found" in printed
    assert printed.count("2 ranks on 2 nodes, started by Slurm") == 2, "the doctor's and the training's"
    assert "`Trainer.fit` stopped: `max_epochs=1` reached." in printed
    assert "JobName=my-run" in slurm.scontrol("show", "job", str(job))


def test_what_is_asked_for_is_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _write("--nodes=64", "--ranks-per-node=8", "--partition=a", "--account=b", folder=tmp_path) == 0
    script = capsys.readouterr().out
    for line in ("nodes=64", "ntasks-per-node=8", "gpus-per-node=8", "partition=a", "account=b", "signal=USR1@120"):
        assert f"#SBATCH --{line}\n" in script
    assert f"fit --config '{tmp_path}/my run/cpu.yaml'" in script


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nodes=0", "--ranks-per-node=1"], "--nodes 0: must be at least 1."),
        (["--nodes=1", "--ranks-per-node=1", "--time=tomorrow"], "--time tomorrow: Slurm does not know it"),
        (["--nodes=1", "--ranks-per-node=1", "--config=none.yaml"], "--config none.yaml: there is no such file"),
    ],
)
def test_what_slurm_would_not_take_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert _write(*arguments, folder=tmp_path) == 2
    assert f"lightning-distrec: {said}" in capsys.readouterr().err
