"""A checkpoint that a thread writes: who looks for it finds it complete; it yields to steps, and
keeps to a limit."""

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_distrec.checkpoint.checkpoint_options import CheckpointOptions
from lightning_distrec.checkpoint.contents import verify
from lightning_distrec.checkpoint.save import (
    WRITER_NICENESS,
    RankContent,
    Saver,
    take_folder_snapshot,
    wait_for_checkpoint,
)
from lightning_distrec.checkpoint.single_file import take_file_snapshot
from lightning_distrec.errors import ConfigError
from tests.support.checkpoint_folders import SingleRank, by_rows


class SlowFile:
    """Takes its time."""

    def __init__(self, path: Path) -> None:
        self.path, self.may_end, self.niceness = path, threading.Event(), 0

    def on_host(self) -> "SlowFile":
        return self

    def write(self, ranks: object, pace: object) -> None:
        self.niceness = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        self.may_end.wait(10)
        time.sleep(0.1)
        self.path.write_text("all of it")


def test_a_checkpoint_in_flight_is_waited_for(tmp_path: Path) -> None:
    saver, file = Saver(SingleRank(), is_async=True), SlowFile(tmp_path / "a.ckpt")
    saver.save(file)
    assert not wait_for_checkpoint(tmp_path / "b.ckpt")
    file.may_end.set()
    assert wait_for_checkpoint(tmp_path / "a.ckpt")
    saver.finish()
    assert wait_for_checkpoint(tmp_path / "a.ckpt")


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own")
def test_the_thread_that_writes_yields_to_steps_and_nothing_else_does(tmp_path: Path) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    saver, file = Saver(SingleRank(), is_async=True), SlowFile(tmp_path / "a.ckpt")
    file.may_end.set()
    saver.save(file)
    saver.finish()
    assert file.niceness == min(19, before + WRITER_NICENESS)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


@pytest.mark.parametrize("form", ["folder", "file"])
def test_writing_keeps_to_its_limit_until_somebody_waits_for_it(tmp_path: Path, form: str) -> None:
    table = torch.arange(2**20, dtype=torch.float32).view(-1, 4)  # 4 MiB
    path = tmp_path / "a.ckpt"
    content = RankContent(
        path=path, checkpoint={"state_dict": {"table": by_rows(table)}, "global_step": 1}
    )
    snapshot: Any = {"folder": take_folder_snapshot, "file": take_file_snapshot}[form](
        content, SingleRank()
    )
    saver = Saver(SingleRank(), is_async=True, bytes_per_second=4 * 2**20)
    began = time.monotonic()
    saver.save(snapshot)
    assert wait_for_checkpoint(path)  # as a logger does, whose wait lifts no limit
    assert time.monotonic() - began > 0.7  # the first of four blocks does not wait
    saver.finish()
    saver = Saver(SingleRank(), is_async=True, bytes_per_second=2**12)
    saver.save(snapshot)
    saver.finish(timeout_seconds=100)  # at the limit it would take 1,000 s
    assert verify(path) == []


def test_a_limit_needs_a_save_that_training_does_not_wait_for() -> None:
    assert (
        CheckpointOptions(async_save=True, async_bytes_per_second="200MB/s").writing_limit == 200e6
    )
    with pytest.raises(ConfigError, match="Set async_save=True too"):
        CheckpointOptions(async_bytes_per_second="200MB/s")
    with pytest.raises(ConfigError, match="A bandwidth above 0 is needed"):
        CheckpointOptions(async_save=True, async_bytes_per_second="fast")
