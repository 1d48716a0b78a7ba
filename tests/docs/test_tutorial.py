"""The tutorial is followed from an empty folder: its files, its commands and what they print."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from lightning_distrec.cli.main import main
from tests.docs.snippets import Block, _compare, blocks_of, commands_of
from tests.support.console import finished
from tests.support.environments import environment
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).parents[2]
BLOCKS = list(blocks_of((ROOT / "docs/tutorial.md").read_text("utf-8")))
FILES = {block.file: block.text for block in BLOCKS if block.file}
HAS_BASELINES = all(map(importlib.util.find_spec, ("lightgbm", "sklearn")))


def _output_of(command: str, folder: Path) -> str:
    """Run a command as a user with the environment activated; return what it prints."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", PATH=path)
    done = finished(command, folder, env=variables, shell=True)
    assert done.returncode == 0, f"'{command}':\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout + done.stderr


def _follow(block: Block, folder: Path) -> None:
    if block.file:
        text = block.text.replace("else 200_000", "else 20_000")
        (folder / block.file).write_text(text)
    needs_baselines = "baselines.py" in block.text and not HAS_BASELINES
    if block.language != "console" or needs_baselines:
        return
    for command, shown in commands_of(block.text):
        _compare(command, shown, _output_of(command, folder))


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_SECONDS)
def test_the_tutorial_is_followed_from_an_empty_folder(tmp_path: Path) -> None:
    for block in BLOCKS:
        _follow(block, tmp_path)


@pytest.mark.parametrize("job", ["clicks.yaml", "next.yaml"])
def test_a_model_of_the_tutorial_trains_in_one_process(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    monkeypatch.setattr(sys, "argv", ["make_clicks.py", "2000"])
    exec(compile(FILES["make_clicks.py"], "make_clicks.py", "exec"), {})
    one_process = ["--trainer.devices=1", "--trainer.strategy=auto"]
    assert not main(["fit", "--config", job, *one_process, "--trainer.fast_dev_run=2"])
