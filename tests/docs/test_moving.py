"""The scripts of "From TorchRec" train the same model to the same losses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.snippets import blocks_of
from tests.support.limits import LIMIT_SECONDS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how_to/from_torchrec.md"


def _losses(folder: Path, *arguments: str) -> list[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if line.startswith("loss ")]


@pytest.mark.slow
def test_the_two_scripts_print_the_same_losses(tmp_path: Path) -> None:
    for block in blocks_of(PAGE.read_text("utf-8")):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    by_torchrec = _losses(tmp_path, *torchrun, "by_torchrec.py")
    assert len(by_torchrec) == len(set(by_torchrec)) == 10
    assert _losses(tmp_path, "by_lightning.py") == by_torchrec
