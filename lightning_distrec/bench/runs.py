"""One run of a recipe, as a process of its own through the console script, and what its ranks have measured."""

import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """A strategy on a number of devices."""

    strategy: str
    devices: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run has measured, or why it has not."""

    step_seconds: float = 0.0
    """The median of the steps, each as long as on its slowest rank."""
    samples_per_second: float | None = None
    """Of all ranks together; None: a batch does not tell how many samples it has."""
    peak_bytes: int = 0
    """The most memory of any rank."""
    why_not: str = ""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is run."""

    configs: tuple[str, ...]
    steps: int
    warmup_steps: int
    timeout_seconds: float


def run(case: Case, wanted: Wanted) -> Run:
    """Run the recipe under one strategy: so many steps, without validation, checkpoints, loggers and callbacks."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_distrec.cli.main", *arguments(case, wanted, folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # its ranks are in it too, so that all of them can be ended
        )
        try:
            said = process.communicate(timeout=wanted.timeout_seconds)[1]
        except subprocess.TimeoutExpired:
            return Run(why_not=f"it was not done after {wanted.timeout_seconds:g} s")
        finally:
            _end(process)
        if process.returncode:
            return Run(why_not=reason(said, process.returncode))
        files = sorted(Path(folder).glob("*.json"))
        return measured([json.loads(file.read_text()) for file in files], case.devices, wanted.steps)


def arguments(case: Case, wanted: Wanted, folder: str) -> list[str]:
    """Return the command line of a run, without the program."""
    measures = {"class_path": "lightning_distrec.bench.measures.Measures"}
    options = {"folder": folder, "warmup_steps": wanted.warmup_steps}
    trainer: dict[str, object] = {
        "strategy": case.strategy,
        "devices": case.devices,
        "num_nodes": 1,
        "max_steps": wanted.warmup_steps + wanted.steps,
        "max_epochs": -1,
        "max_time": "null",
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": "false",
        "enable_model_summary": "false",
        "enable_checkpointing": "false",
        "logger": "false",
        "default_root_dir": folder,
        "callbacks": json.dumps([{**measures, "init_args": options}]),
    }
    configs = [part for config in wanted.configs for part in ("--config", config)]
    return ["fit", *configs, *(f"--trainer.{name}={value}" for name, value in trainer.items())]


def measured(of_ranks: Sequence[dict], devices: int, steps: int) -> Run:
    """Return a run's numbers. of_ranks: what each rank's `Measures` has written."""
    if len(of_ranks) != devices:
        return Run(why_not=f"{len(of_ranks)} of {devices} ranks have measured")
    seconds = [max(times) for times in zip(*(rank["seconds"] for rank in of_ranks), strict=False)]
    if not seconds:
        return Run(why_not=f"the data ended before {steps} steps were measured")
    samples = [
        sum(counts) for counts in zip(*(rank["samples"] for rank in of_ranks), strict=False) if None not in counts
    ]
    per_second = sum(samples) / len(seconds) / statistics.median(seconds) if len(samples) == len(seconds) else None
    return Run(
        step_seconds=statistics.median(seconds),
        samples_per_second=per_second,
        peak_bytes=max(rank["peak_bytes"] for rank in of_ranks),
    )


def reason(said: str, code: int) -> str:
    """Return why a run failed: the error of ours that it ended with, else its last error, else its last line."""
    errors = re.findall(r"^\W*(?:\[?rank\W*\d+\]?:?\s*)?((?:\w+\.)*\w*(?:Error|Exception)): (.+)$", said, re.MULTILINE)
    ours = [text for kind, text in errors if kind.startswith("lightning_distrec.errors.") and "RankError" not in kind]
    if ours:
        return str(ours[0])
    if errors:
        return f"{errors[-1][0]}: {errors[-1][1]}"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[-1] if lines else f"it ended with exit code {code}"


def _end(process: "subprocess.Popen[str]") -> None:
    """End what is still there of a run: of the session that it was started in."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
