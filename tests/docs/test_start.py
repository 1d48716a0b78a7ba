"""The start page, followed from an empty folder: train, resume, predict, export, ask."""

import os
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from lightning_distrec.cli.main import main
from tests.docs.snippets import _make_classes, blocks_of, commands_of
from tests.support.console import finished

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent
BLOCKS = list(blocks_of((ROOT / "docs/index.md").read_text("utf-8")))


def _output_of(command: str, folder: Path) -> str:
    program, *arguments = shlex.split(command)
    done = finished(
        [PROGRAMS / program, *arguments],
        folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{command}\n{output[-3000:]}"
    return output


def test_the_model_of_the_start_page_trains_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block in BLOCKS:
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "clicks", raising=False)
    _make_classes(yaml.safe_load(Path("job.yaml").read_text()))
    one_process = ["--trainer.devices=1", "--trainer.strategy=auto"]
    assert not main(["fit", "--config", "job.yaml", *one_process, "--trainer.fast_dev_run=2"])


@pytest.mark.slow
def test_the_start_page_leads_from_a_dataframe_to_answers(tmp_path: Path) -> None:
    for block in BLOCKS:
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    outputs = {}
    for block in BLOCKS:
        if block.language == "console" and not block.not_run:
            for command, _ in commands_of(block.text):
                outputs[command.split()[1]] = _output_of(command, tmp_path)
    assert "Epoch 1/1" in outputs["fit"], "it goes on with the second epoch"
    assert "Wrote 20,000 predictions to predictions.parquet." in outputs["predict"]
    assert 0.5 < float(outputs["served_clicks/serve.py"].strip(" []\n")) < 1, "user 0 clicks"
