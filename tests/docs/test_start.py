"""The start page, followed from an empty folder: train, resume, predict, export, ask."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.snippets import blocks_of, commands_of
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(sys.executable).parent


def _output_of(command: str, folder: Path) -> str:
    program, *arguments = shlex.split(command)
    done = subprocess.run(
        [PROGRAMS / program, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{command}\n{output[-3000:]}"
    return output


@pytest.mark.slow
def test_the_start_page_leads_from_a_dataframe_to_answers(tmp_path: Path) -> None:
    blocks = list(blocks_of((ROOT / "docs/index.md").read_text("utf-8")))
    for block in blocks:
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    outputs = {}
    for block in blocks:
        if block.language == "console" and not block.not_run:
            for command, _ in commands_of(block.text):
                outputs[command.split()[1]] = _output_of(command, tmp_path)
    assert "Epoch 1/1" in outputs["fit"], "it goes on with the second epoch"
    assert "Wrote 20,000 predictions to predictions.parquet." in outputs["predict"]
    assert 0.5 < float(outputs["served_clicks/serve.py"].strip(" []\n")) < 1, "user 0 clicks"
