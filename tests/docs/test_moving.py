"""The scripts of "From TorchRec" train the same model to the same losses."""

import os
import sys
from pathlib import Path

import pytest

from tests.docs.snippets import blocks_of
from tests.support.console import finished

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/how_to/from_torchrec.md"
ABORT = "terminate called without an active exception"
"""How one of ten runs of TorchRec's script ends, whose tables outlive its process group;
lightning_distrec/strategies/run/process_runs.py says why."""


def _losses(folder: Path, *arguments: str, tries: int = 1) -> list[str]:
    """Return the lines of losses. tries: runs, where one ends by gloo's abort."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for _ in range(tries):
        done = finished([sys.executable, *arguments], folder, env=environment)
        if ABORT not in done.stderr:
            break
    assert done.returncode == 0, done.stderr[-3000:]
    return [line for line in done.stdout.splitlines() if line.startswith("loss ")]


@pytest.mark.slow
def test_the_two_scripts_print_the_same_losses(tmp_path: Path) -> None:
    for block in blocks_of(PAGE.read_text("utf-8")):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    by_torchrec = _losses(tmp_path, *torchrun, "by_torchrec.py", tries=4)
    assert len(by_torchrec) == len(set(by_torchrec)) == 10
    assert _losses(tmp_path, "by_lightning.py") == by_torchrec
