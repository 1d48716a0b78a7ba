"""`launched_script` with a rank that fails at its third batch, or while a checkpoint is saved.

RANK=1 ... python -m tests.support.faulty_script KIND [OPTIONS of the strategy as JSON]
"""

import contextlib
import ctypes
import hashlib
import json
import os
import signal
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_distrec import TorchRecShardedStrategy
from lightning_distrec.strategies.run import process_runs
from tests.support.launched_script import Clicks, Numbered

FAULTY = 1
APART: list[Any] = []


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_but_a_worker() -> None:
    """Be killed, while a fork lives on, as workers of dataloaders do: with copies of all sockets."""
    worker = os.fork()
    if worker == 0:
        for name in os.listdir("/proc/self/fd"):
            # What tells the test that this process is gone is a pipe.
            with contextlib.suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                    os.close(int(name))
        time.sleep(WORKER_SECONDS)
        os._exit(0)
    Path(os.environ["FAULTY_FOLDER"], "worker").write_text(f"{worker} {time.time()}")
    _kill()


WORKER_SECONDS = 60
STOPPED_SECONDS = 12
"""How long a rank is stopped: the others have ended by then."""


def _stop() -> None:
    """Be stopped, and go on later: nobody else ends this process in a test, as a launcher does."""
    if os.fork() == 0:
        time.sleep(STOPPED_SECONDS)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def _raise() -> None:
    raise ValueError("a fault of this rank alone")


def _term() -> None:
    print(f"TERM {time.time()}", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def _collective() -> None:
    # Of a group that nothing else uses: gloo would take it for the others' next exchange, or abort
    # where sizes differ.
    dist.all_reduce(torch.zeros(3), group=APART[0])


def _wait() -> None:
    Path(os.environ["FAULTY_FOLDER"], "waits").touch()
    time.sleep(3600)


def _hold() -> None:
    ctypes.PyDLL(None).sleep(6)  # PyDLL keeps the interpreter to itself meanwhile


def _hang() -> None:
    """Wait in a collective, as freeing a GPU's memory waits for kernels: ranks 0 and 2 for each
    other, without end."""
    dist.recv(torch.zeros(1), src=2 - dist.get_rank(), group=APART[0])


def _spin() -> None:
    """Take a processor, as waits for a GPU and NCCL's threads do."""
    while True:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 20)


def hang_at_exit() -> None:
    """Leave as a script does at its end, and hang meanwhile."""
    with patch.object(process_runs, "forget_consensus", _hang):
        process_runs.PROCESS.leave()


FAULTS = {
    "hold": _hold,
    "wait": _wait,
    "kill": _kill,
    "kill_but_a_worker": _kill_but_a_worker,
    "stop": _stop,
    "raise": _raise,
    "collective": _collective,
    "exit": sys.exit,
    "term": _term,
}


class Faulty(Clicks):
    """Rank 1 fails, in one of FAULTS."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        fault, _, self._then = kind.partition(", then ")
        self._kind, _, self._place = fault.partition(" ")

    def on_train_start(self) -> None:
        APART.append(dist.new_group())
        if self._then == "spin":
            threading.Thread(target=_spin, daemon=True).start()
        if self._then == "hang in teardown" and self.global_rank != FAULTY:
            self.trainer.strategy.run.undo.callback(_hang)

    def _fail(self, place: str) -> None:
        if place != self._place or self.global_rank != FAULTY:
            return
        if self._kind == "save":
            self.trainer.save_checkpoint(Path(os.environ["FAULTY_FOLDER"], "alone.ckpt"))
        elif self._kind == "leave":
            self.trainer.should_stop = True
        else:
            FAULTS[self._kind]()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.02)
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            self._fail("in a step")
        return loss

    def on_train_end(self) -> None:
        self._fail("at the end")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._fail("in a checkpoint")

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)


def fail_at_start(place: str) -> None:
    """Let this rank be killed while the ranks meet: at the first contact, or around
    init_process_group."""
    if place == "at the first contact":
        start = process_runs.PROCESS.start_heartbeat
        process_runs.PROCESS.start_heartbeat = lambda *args: (start(*args), _kill())  # type: ignore[assignment, return-value]
    elif place == "before the process group":
        dist.init_process_group = lambda *_, **__: _kill()
    elif place == "after the process group":
        init = dist.init_process_group
        dist.init_process_group = lambda *args, **options: (init(*args, **options), _kill())


def fit_and_validate(
    kind: str, folder: str, options: dict[str, Any], **settings: Any
) -> list[float]:
    """Fit, and validate on those ranks that come so far; return the losses. options: of the
    strategy."""
    pl.seed_everything(1)
    os.environ["FAULTY_FOLDER"] = folder
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy=TorchRecShardedStrategy(**options),
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1)],
        **settings,
    )
    loader = DataLoader(Numbered(), batch_size=2)
    model = Faulty(kind)
    trainer.fit(model, loader)
    if kind == "exit between" and trainer.global_rank == FAULTY:
        sys.exit(3)
    if not kind.endswith("at the end"):
        trainer.validate(model, loader)
    return model.losses


if __name__ == "__main__":
    fit_and_validate(
        sys.argv[1],
        os.environ["FAULTY_FOLDER"],
        json.loads(sys.argv[2] if len(sys.argv) > 2 else "{}"),
    )
