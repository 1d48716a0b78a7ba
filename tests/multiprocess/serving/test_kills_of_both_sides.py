"""A recipe trains with a server beside it that follows; both are killed, again and again, and every
answer is right for the step that it names."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest
import yaml

from lightning_distrec.cli.main import main
from tests.support.ports import free_port

ROOT = Path(__file__).resolve().parents[3]
RECIPE = ROOT / "recipes" / "criteo_dlrm" / "cpu.yaml"
SECONDS = 60 * float(os.environ.get("FOLLOWED_MINUTES", "1.5"))
EVERY = 40
NUM_EXAMPLES = 16
CHECKED = 6
"""So many of the steps are compared with an export of their checkpoint."""


def _write_config(folder: Path) -> Path:
    checkpoints = {
        "dirpath": f"{folder}/checkpoints",
        "filename": "{step}",
        "every_n_train_steps": EVERY,
        "save_top_k": -1,
    }
    publish = {"folder": f"{folder}/published", "every_n_steps": EVERY, "full_every": 5, "keep": 8}
    callbacks = [
        {"class_path": "lightning_distrec.PublishRows", "init_args": publish},
        {"class_path": "lightning.pytorch.callbacks.ModelCheckpoint", "init_args": checkpoints},
    ]
    trainer = {
        "max_steps": 100_000,
        "max_epochs": -1,
        "limit_val_batches": 0,
        "logger": False,
        "enable_progress_bar": False,
        "default_root_dir": str(folder),
        "callbacks": callbacks,
    }
    path = folder / "job.yaml"
    small = {"class_path": "recipes.criteo_dlrm.data.CriteoDataModule"}
    small["init_args"] = {"num_examples": 200_000}
    path.write_text(yaml.safe_dump({"trainer": trainer, "data": small}))
    return path


def _newest_checkpoint(folder: Path) -> str | None:
    steps = {}
    for path in (folder / "checkpoints").glob("step=*.ckpt"):
        steps[int(path.stem.split("=")[1].split("-")[0])] = path
    return str(steps[max(steps)]) if steps else None


class Processes:
    """The job and the server, each started again after it was killed."""

    def __init__(self, folder: Path, config: Path) -> None:
        self._folder = folder
        self._command = [sys.executable, "-m", "lightning_distrec", "fit"]
        self._command += ["--config", str(RECIPE), "--config", str(config)]
        self._draw = random.Random(3)
        self.num_kills = {"job": 0, "server": 0}
        self.url = ""
        self.log = open(folder / "log", "w")  # noqa: SIM115  `end` closes it

    def start_job(self) -> None:
        checkpoint = _newest_checkpoint(self._folder)
        resume = [] if checkpoint is None else ["--ckpt_path", checkpoint]
        self.job = subprocess.Popen(
            self._command + resume,
            cwd=ROOT,
            start_new_session=True,
            stdout=self.log,
            stderr=self.log,
        )

    def start_server(self) -> None:
        """Start it at a port of its own: one that was killed may still have the other."""
        port = str(free_port())
        self.url = f"http://127.0.0.1:{port}/predict"
        script = str(self._folder / "served" / "app.py")
        options = ["--port", port, "--follow", str(self._folder / "published")]
        self.server = subprocess.Popen(
            [sys.executable, script, *options], stdout=self.log, stderr=self.log
        )

    def kill_one(self) -> None:
        """Kill the server, or one of the job's two ranks; the other one ends by itself, or is
        ended."""
        if self._draw.random() < 0.5:
            self.num_kills["server"] += 1
            self.server.kill()
            self.server.wait()
            self.start_server()
            return
        self.num_kills["job"] += 1
        listed = subprocess.run(
            ["pgrep", "-g", str(self.job.pid)], capture_output=True, text=True, check=False
        )
        os.kill(self._draw.choice([*map(int, listed.stdout.split())]), signal.SIGKILL)
        time.sleep(1)
        self.end_job()
        self.start_job()

    def end_job(self) -> None:
        with_group = os.getpgid(self.job.pid) if self.job.poll() is None else self.job.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(with_group, signal.SIGKILL)
        self.job.wait()

    def end(self) -> None:
        self.end_job()
        self.server.kill()
        self.server.wait()
        self.log.close()


@pytest.mark.slow
def test_answers_are_those_of_their_step(tmp_path: Path) -> None:
    processes = Processes(tmp_path, _write_config(tmp_path))
    processes.start_job()
    while _newest_checkpoint(tmp_path) is None:
        assert processes.job.poll() is None, (tmp_path / "log").read_text()[-3000:]
        time.sleep(0.5)
    export = ["--format", "torch.export", "--config", str(RECIPE)]
    assert (
        main(["export", str(_newest_checkpoint(tmp_path)), str(tmp_path / "served"), *export]) == 0
    )
    request = (tmp_path / "served" / "request.json").read_bytes()
    processes.start_server()
    answers: dict[int, set[str]] = {}
    end = time.monotonic() + SECONDS
    next_kill = time.monotonic() + 15
    try:
        while time.monotonic() < end:
            try:
                json_request = Request(processes.url, request, {"Content-Type": "application/json"})
                with urlopen(json_request, timeout=30) as answer:
                    text = answer.read().decode()
                    answers.setdefault(int(answer.headers["Step"]), set()).add(text)
            except (URLError, OSError):
                pass  # it was killed
            if time.monotonic() > next_kill:
                processes.kill_one()
                next_kill = time.monotonic() + random.Random(len(answers)).uniform(5, 25)
            time.sleep(0.02)
    finally:
        processes.end()
    print(f"{sorted(answers)} {processes.num_kills}")
    assert min(processes.num_kills.values()) >= (1 if SECONDS < 120 else 5)
    assert len(answers) >= 3
    # A resumed run repeats the steps that were lost, to the digit: a step has one answer.
    assert all(len(texts) == 1 for texts in answers.values())
    steps = random.Random(1).sample(sorted(answers), min(CHECKED, len(answers)))
    for step in steps:
        assert json.loads(next(iter(answers[step]))) == _exported_answer(tmp_path, step, request)


def _exported_answer(folder: Path, step: int, request: bytes) -> Any:
    served = folder / f"served-{step}"
    export = ["--format", "torch.export", "--config", str(RECIPE)]
    checkpoint = sorted((folder / "checkpoints").glob(f"step={step}*.ckpt"))[0]
    assert main(["export", str(checkpoint), str(served), *export]) == 0
    (served / "other.json").write_bytes(request)
    done = subprocess.run(
        [sys.executable, str(served / "serve.py"), str(served / "other.json")],
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)
