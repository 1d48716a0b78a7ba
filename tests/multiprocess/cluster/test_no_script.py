"""Without a script (a notebook, `python -c`) ranks are forked, and the process gets what they
train."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.console import finished
from tests.support.limits import LIMIT_SECONDS

PROGRAM = (Path(__file__).parents[2] / "support" / "notebook_script.py").read_text("utf-8")
GOES_ON = """
import pytest
from lightning_distrec.errors import CheckpointError, ConfigError

assert first.strategy.unshard() is module and type(module.items) is nn.Embedding
module.layer(module.items(torch.tensor([1])))
assert all(torch.equal(value, actual["state"][name]) for name, value in module.state_dict().items())
loaded = Ratings.load_from_checkpoint(actual["best"][1])
assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in module.state_dict().items())
with pytest.raises(ConfigError, match="Make a new Trainer"):
    first.fit(module, DataLoader(ids, 8))
with pytest.raises(CheckpointError, match="with their optimizers' state"):
    first.save_checkpoint(FOLDER + "/half.ckpt")
second = trainer(1)
second.fit(module, DataLoader(ids, 8), DataLoader(ids, 8))
assert second.callback_metrics["error"] < actual["metrics"]["error"]
assert not {"MASTER_PORT", "LIGHTNING_DISTREC_LAUNCHER_PID"} & os.environ.keys()
torch.randn(1_000_000).exp().sum()
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
with pytest.raises(ConfigError, match="ranks cannot be forked from this process"):
    trainer(1).fit(module, DataLoader(ids, 8))
torch.distributed.destroy_process_group()
print("went on")
"""
ALONE = """
alone = pl.Trainer(strategy="ddp_tuned", accelerator="cpu", devices=1, max_epochs=1, logger=False)
alone.fit(module, DataLoader(ids, 8))
"""
THEN_BOTH = """
with pytest.raises(ConfigError, match="this Trainer has 2 ranks, and this process is one of 1"):
    trainer(1).fit(module, DataLoader(ids, 8))
print("trained alone")
"""


def run(
    folder: Path,
    *arguments: str,
    stdin: str = "",
    strategy: str = "torchrec_sharded",
    **environ: str,
) -> str:
    """Run python in a folder; return what it prints."""
    folder.mkdir(exist_ok=True)
    variables = {**os.environ, "FOLDER": str(folder), "STRATEGY": strategy, **environ}
    ended = finished([sys.executable, *arguments], env=variables, input=stdin)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def found_in(folder: Path) -> dict[str, Any]:
    results: dict[str, Any] = torch.load(folder / "found.pt")
    return results


@pytest.mark.slow
def test_a_program_from_stdin_trains_on_forked_ranks_and_goes_on_with_an_ordinary_module(
    tmp_path: Path,
) -> None:
    program = PROGRAM + GOES_ON + ALONE + THEN_BOTH
    printed = run(tmp_path, "-", stdin=program, OMP_NUM_THREADS="2")
    assert "No script to run again: 2 ranks are forked from this process." in printed
    assert "trained alone" in printed


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["torchrec_sharded", "ddp_tuned", "fsdp_tuned"])
def test_forked_ranks_train_what_the_ranks_of_a_script_train(tmp_path: Path, strategy: str) -> None:
    (script := tmp_path / "train.py").write_text(PROGRAM, "utf-8")
    run(tmp_path / "script", str(script), strategy=strategy)
    run(tmp_path / "command", "-c", PROGRAM, strategy=strategy)
    script_results, command_results = found_in(tmp_path / "script"), found_in(tmp_path / "command")
    assert script_results["state"].keys() == command_results["state"].keys()
    for name, value in script_results["state"].items():
        assert torch.equal(value, command_results["state"][name]), name
    for name in ("metrics", "step", "epoch", "validated"):
        assert script_results[name] == command_results[name]
    assert script_results["best"][0] == command_results["best"][0]
    assert (
        Path(command_results["best"][1]).name == Path(script_results["best"][1]).name == "best.ckpt"
    )


@pytest.mark.slow
def test_what_a_forked_rank_raises_is_raised_in_the_notebook(tmp_path: Path) -> None:
    caught = PROGRAM.replace(
        "first.fit(",
        "import pytest\nwith pytest.raises(ValueError, match='on purpose'):\n    first.fit(",
    )
    caught = (
        caught.partition("state =")[0] + "FAILS = ''\ntrainer(1).fit(module, DataLoader(ids, "
        "8))\nprint('went on')\n"
    )
    assert "went on" in run(tmp_path, "-", stdin=caught, FAILS="1 3")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["terminal", "kernel", "killed"])
def test_an_interrupt_or_a_dead_rank_ends_all_forked_ranks(tmp_path: Path, fault: str) -> None:
    variables = {
        **os.environ,
        "FOLDER": str(tmp_path),
        "STRATEGY": "torchrec_sharded",
        "EPOCHS": "10000",
    }
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        **{"env": variables, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True},  # type: ignore[call-overload]
        start_new_session=True,
    ) as notebook:
        ranks: dict[str, int] = {}
        while len(ranks) < 2:
            if step := re.search(r"of rank (\d) in process (\d+);", notebook.stdout.readline()):
                ranks[step[1]] = int(step[2])
        if fault == "terminal":
            os.killpg(notebook.pid, signal.SIGINT)
        elif fault == "kernel":
            os.kill(notebook.pid, signal.SIGINT)
        else:
            os.kill(ranks["1"], signal.SIGKILL)
        printed = notebook.communicate(timeout=LIMIT_SECONDS)[0]
    assert notebook.returncode == 1
    expected = "RankError: rank 1" if fault == "killed" else "Detected KeyboardInterrupt"
    assert expected in printed
    assert not any(Path(f"/proc/{process}").exists() for process in ranks.values())
