"""A command's other ranks import while rank 0 does, and are then as ranks that Lightning starts."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_distrec.cli.asked_ranks import OF_LAUNCHERS, asked_ranks
from lightning_distrec.cluster import early_ranks
from lightning_distrec.cluster.early_ranks import EarlyRank, start_rank
from tests.support.environments import environment
from tests.support.limits import LIMIT_SECONDS
from tests.support.processes import processes_with

JOB = """
seed_everything: 3
trainer: {accelerator: cpu, devices: 2, strategy: ddp_tuned, max_steps: 1, logger: false,
          enable_checkpointing: false, enable_progress_bar: false, enable_model_summary: false,
          callbacks: {class_path: told.Told}}
model: {class_path: lightning.pytorch.demos.boring_classes.BoringModel}
data: {class_path: lightning.pytorch.demos.boring_classes.BoringDataModule}
"""
TOLD = """
import json, os, random, sys, torch
from lightning.pytorch import Callback
class Told(Callback):
    def on_train_end(self, trainer, module):
        state = {"argv": sys.argv, "path": sys.path, "folder": os.getcwd(),
                 "threads": torch.get_num_threads(), "draws": [random.random(), float(torch.rand(()))],
                 "variables": dict(os.environ), "started": sys.orig_argv}
        with open(f"rank{trainer.global_rank}.json", "w") as file:
            json.dump(state, file)
"""


def _fit(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    (folder / "told.py").write_text(TOLD)
    (folder / "job.yaml").write_text(JOB)
    return subprocess.run(
        [sys.executable, "-m", "lightning_distrec", "fit", "--config", "job.yaml", *arguments],
        cwd=folder,
        env=environment(OF_TEST=str(folder), GLOO_SOCKET_IFNAME="lo", PYTHONPATH=os.getcwd()),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


def test_an_early_rank_inherits_what_rank_0_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # more than a pipe holds
    monkeypatch.setenv("LONG", "x" * 100_000)
    done = _fit(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    states: list[dict[str, Any]] = [
        json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)
    ]
    starts = [rank.pop("started") for rank in states]
    assert early_ranks.__name__ not in str(starts[0])
    assert early_ranks.__name__ in str(starts[1])
    assert [rank["variables"].pop("LOCAL_RANK") for rank in states] == ["0", "1"]
    assert states[0] == states[1]


def test_a_command_that_is_refused_leaves_nobody(tmp_path: Path) -> None:
    done = _fit(tmp_path, "--trainer.max_steps", "many")
    assert done.returncode == 2
    assert done.stderr.count("max_steps") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert not processes_with(f"OF_TEST={tmp_path}")


@pytest.fixture
def early() -> Iterator[EarlyRank]:
    waiting = EarlyRank(1, "TunedDDPStrategy", [])
    early_ranks._early["1"] = waiting
    yield waiting
    early_ranks._early.clear()
    waiting.process.kill()
    waiting.process.wait()


def test_another_process_is_started_where_the_early_one_has_died(
    early: EarlyRank, capfd: pytest.CaptureFixture[str]
) -> None:
    early.process.kill()
    early.process.wait()
    variables = environment(LOCAL_RANK="1")
    process = start_rank([sys.executable, "-c", "print('started')"], variables, None)
    assert process is not early.process
    assert process.wait(LIMIT_SECONDS) == 0
    assert capfd.readouterr() == ("started\n", "")


def test_an_interrupt_ends_an_early_rank_without_a_word(
    early: EarlyRank, capfd: pytest.CaptureFixture[str]
) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while "libtorch" not in Path(f"/proc/{early.process.pid}/maps").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    early.process.send_signal(signal.SIGINT)
    assert early.process.wait(LIMIT_SECONDS) == -signal.SIGINT
    assert capfd.readouterr() == ("", "")


def test_an_early_rank_ends_with_the_process_that_has_started_it(early: EarlyRank) -> None:
    os.close(early._writing)
    assert early.process.wait(LIMIT_SECONDS) == 0


ASKED = {
    "--config {job}": (2, "TunedDDPStrategy"),
    "--config={job} --trainer.devices 3": (3, "TunedDDPStrategy"),
    "-c {job} --trainer.strategy=lightning_distrec.TunedFSDPStrategy": (2, "TunedFSDPStrategy"),
    "--config {job} --trainer.strategy ddp": (1, ""),
    "--config {job} --trainer.num_nodes 2": (1, ""),
    "--config {job} --trainer.devices auto": (1, ""),
    "--config none.yaml": (1, ""),
    "--trainer.strategy ddp_tuned --trainer.devices": (1, ""),
    "--trainer.strategy ddp_tuned": (1, "TunedDDPStrategy"),
}


@pytest.mark.parametrize("arguments", ASKED)
def test_how_many_ranks_are_asked_for(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in OF_LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    (job := tmp_path / "job.yaml").write_text(JOB)
    words = ["fit", *arguments.format(job=job).split()]
    assert asked_ranks(words) == ASKED[arguments]
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert asked_ranks(words) == (1, "")
