"""Who looks for a checkpoint that a thread is writing finds it complete."""

import threading
import time
from pathlib import Path

from lightning_distrec.checkpoint.save import Saver, wait_for_checkpoint
from tests.support.checkpoint_folders import SingleRank


class SlowFile:
    """Takes its time."""

    def __init__(self, path: Path) -> None:
        self.path, self.may_end = path, threading.Event()

    def on_host(self) -> "SlowFile":
        return self

    def write(self, ranks: object) -> None:
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
