"""A file system without inodes: a checkpoint fails with the reason, the old one stays, and nothing
is left behind."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_distrec.checkpoint.atomic_folder import NEW, UNFINISHED, is_checkpoint
from lightning_distrec.checkpoint.save import RankContent, take_folder_snapshot
from lightning_distrec.checkpoint.single_file import take_file_snapshot
from lightning_distrec.errors import CheckpointError
from tests.support.checkpoint_folders import SingleRank, by_rows
from tests.support.plain_checkpoints import load

NUM_INODES = 40


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of few inodes."""
    command = ["mount", "-t", "tmpfs", "-o", f"nr_inodes={NUM_INODES}", "tmpfs", str(tmp_path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def _snapshot(path: Path, step: int, kind: str) -> Any:
    table = by_rows(torch.full((8, 4), float(step)), 4)
    checkpoint = {"epoch": 0, "global_step": step, "state_dict": {"table": table}, "loops": {}}
    if kind == "file":
        return take_file_snapshot(RankContent(path=path, checkpoint=checkpoint), SingleRank())
    facts = {"epoch": 0, "global_step": step}
    return take_folder_snapshot(
        RankContent(path=path, checkpoint=checkpoint, facts=facts), SingleRank()
    )


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_checkpoint_that_gets_no_inode_leaves_nothing_behind(small: Path, kind: str) -> None:
    path = small / "it.ckpt"
    _snapshot(path, 1, kind).write(SingleRank())
    used = 0
    while os.statvfs(small).f_ffree:
        (small / f"ballast{used}").touch()
        used += 1
    outcomes = []
    for free in range(10):
        try:
            _snapshot(path, 2, kind).write(SingleRank())
            outcomes.append("saved")
        except CheckpointError as error:
            outcomes.append("refused" if "No space left on device" in str(error) else str(error))
        leftovers = [
            item.name for item in small.iterdir() if item.name.startswith((NEW, UNFINISHED))
        ]
        assert leftovers == [], f"with {free} inodes"
        assert is_checkpoint(path)
        assert load(path, 0, 1).checkpoint["global_step"] == (2 if outcomes[-1] == "saved" else 1)
        if outcomes[-1] == "saved":
            break
        (small / f"ballast{free}").unlink()
    assert outcomes == ["refused"] * (len(outcomes) - 1) + ["saved"]
    assert len(outcomes) > 3
