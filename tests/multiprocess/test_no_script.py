"""Without a script, Lightning cannot start the other ranks: an error says what to do."""

import subprocess
import sys

import pytest

CODE = """
import lightning.pytorch as pl, lightning_distrec
pl.Trainer(strategy="ddp_tuned", accelerator="cpu", devices=1, logger=False)
pl.Trainer(strategy="ddp_tuned", accelerator="cpu", devices=2, logger=False)
"""


@pytest.mark.parametrize(
    ("arguments", "stdin", "where"),
    [
        (["-c", CODE], "", "python -c has no script"),
        pytest.param(["-"], CODE, "python - has no script", marks=pytest.mark.slow),
        pytest.param(["-i", "-"], CODE, "a notebook or an interactive session has no script", marks=pytest.mark.slow),
    ],
    ids=["-c", "-", "interactive"],
)
def test_without_a_script_an_error_says_what_to_do(arguments: list[str], stdin: str, where: str) -> None:
    ended = subprocess.run(
        [sys.executable, *arguments], input=stdin, capture_output=True, text=True, timeout=120, check=False
    )
    assert f"ConfigError: 2 ranks: the others are started by running the script again, and {where}" in ended.stderr
    assert "%%writefile train.py" in ended.stderr
    assert "ddp_notebook trains without sharding" in ended.stderr
