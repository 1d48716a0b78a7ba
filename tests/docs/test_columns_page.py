"""The page of columns, followed from an empty folder: train, go on, export, ask."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.snippets import blocks_of
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how_to/columns.md"


def _output_of(folder: Path, command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    program = Path(sys.executable).parent / command.partition(" ")[0]
    done = subprocess.run(
        [program, *shlex.split(command)[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_raw_values_are_answered_after_a_fit_that_stopped_in_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outputs = []
    for block in blocks_of(PAGE.read_text("utf-8")):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
        elif block.language == "python":
            exec(block.text, {})
        elif block.language == "console":
            lines = block.text.replace("\\\n", " ").splitlines()
            outputs += [_output_of(tmp_path, line[2:]) for line in lines if line[:2] == "$ "]
    known, unknown = json.loads(outputs[-1])
    assert "served_shop: 4 tables" in outputs[-2]
    assert known > 0.6, "clicks are likelier in Bern"
    assert unknown < 0.4
