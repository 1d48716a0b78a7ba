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
def test_slurm_runs_it_on_two_nodes(
    slurm: Slurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run.sh"
    sizes = ("--nodes=2", "--ranks-per-node=1", "--gpus=false", "--cpus-per-rank=2", "--time=10")
    assert _write(*sizes, f"--out={out}", folder=tmp_path) == 0
    assert capsys.readouterr().out == f"Wrote {out}. Submit it with: sbatch {out}\n"
    job = slurm.sbatch(out.read_text(), env={"OMP_NUM_THREADS": "1"})
    assert slurm.wait(job) == "COMPLETED", slurm.output(job)
    printed = slurm.output(job)
    assert "No problems found" in printed
    assert printed.count("2 ranks on 2 nodes, started by Slurm") == 2, (
        "the doctor's and the training's"
    )
    assert "`Trainer.fit` stopped: `max_epochs=1` reached." in printed
    assert "JobName=my-run" in slurm.scontrol("show", "job", str(job))


def test_several_files_overrides_and_lines_of_the_site_are_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (second_config := tmp_path / "more.yaml").write_text("trainer: {num_nodes: 2}")
    sizes = ("--nodes=2", "--ranks-per-node=4", "--cpus-per-rank=3")
    site = (
        "--setup=module load cuda",
        "--setup=conda activate a",
        "--sbatch=qos=high",
        "--error=%x.err",
        "--output=logs/%j",
    )
    arguments = (
        *sizes,
        *site,
        "--launcher=torchrun",
        f"--config={second_config}",
        "--",
        "--trainer.max_epochs=3",
    )
    assert _write(*arguments, folder=tmp_path) == 0
    script = capsys.readouterr().out
    for line in (
        "ntasks-per-node=1",
        "gpus-per-node=4",
        "cpus-per-task=12",
        "error=%x.err",
        "output=logs/%j",
        "qos=high",
    ):
        assert f"#SBATCH --{line}\n" in script
    assert script.index("module load cuda\nconda activate a\n") < script.index("doctor")
    assert f"cpu.yaml' --config {second_config} --trainer.max_epochs=3\n" in script
    assert script.count("--nnodes=2 --nproc-per-node=4 --max-restarts=3") == 2
    assert script.count('--rdzv-endpoint="$host" --rdzv-id="$attempt"') == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes=0", "--ranks-per-node=1"], "--nodes 0: must be at least 1."),
        (
            ["--nodes=1", "--ranks-per-node=1", "--time=tomorrow"],
            "--time tomorrow: Slurm does not know it",
        ),
        (
            ["--nodes=1", "--ranks-per-node=1", "--config=none.yaml"],
            "--config none.yaml: there is no such file",
        ),
        (
            ["--nodes=1", "--ranks-per-node=1", "--sbatch=--qos=high"],
            "--sbatch '--qos=high': give an option without",
        ),
    ],
)
def test_what_slurm_would_not_take_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert _write(*arguments, folder=tmp_path) == 2
    assert f"lightning-distrec: {message}" in capsys.readouterr().err
