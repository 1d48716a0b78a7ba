"""The command line, called in this process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_distrec.cli import main

Run = Callable[..., tuple[int, str, str]]


def run_command(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command."""
    capsys.readouterr()
    try:
        code = main.main(args)
    except SystemExit as leaving:
        code = int(leaving.code or 0)
    return (code, *capsys.readouterr())


def write_config(model: str, data: str, trainer: dict[str, Any], **data_options: Any) -> None:
    """Write job.yaml into the current folder. model, data: class paths."""
    config = {
        "model": {"class_path": model},
        "data": {"class_path": data, "init_args": data_options},
        "trainer": trainer,
    }
    Path("job.yaml").write_text(yaml.safe_dump(config))
