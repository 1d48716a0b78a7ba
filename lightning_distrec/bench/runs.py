"""One run of a recipe in a process of its own, through the console script, and what its ranks measured."""

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
class BenchOptions:
    """What is the same in all runs."""

    configs: tuple[str, ...]
    steps: int
    warmup_steps: int
    timeout_seconds: float


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """The measurements of one run, or why there are none."""

    step_seconds: float = 0.0
    """Median of the steps; each step takes as long as on its slowest rank."""
    samples_per_second: float | None = None
    """Of all ranks; None: the number of samples in a batch is unknown."""
    peak_bytes: int = 0
    """Peak memory of the rank that uses most."""
    failure: str = ""
    """Why nothing was measured."""


def run(case: Case, options: BenchOptions) -> MeasuredRun:
    """Run the recipe under one strategy without validation, checkpoints, loggers and callbacks."""
    with tempfile.TemporaryDirectory() as folder:
        # A process of its own, so that no process group, GPU memory or patch of a run reaches the next.
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_distrec", *arguments(case, options, folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            # The ranks that it starts belong to the session's process group too, so that all can be killed at once.
            start_new_session=True,
        )
        try:
            stderr = process.communicate(timeout=options.timeout_seconds)[1]
        except subprocess.TimeoutExpired:
            return MeasuredRun(failure=f"the run did not end within {options.timeout_seconds:g} s")
        finally:
            # Also where the run has ended: ranks of it may live on, and would slow down the next run.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        if process.returncode:
            return MeasuredRun(failure=failure_in(stderr, process.returncode))
        files = sorted(Path(folder).glob("*.json"))
        return summarize([json.loads(file.read_text()) for file in files], case.devices, options.steps)


def arguments(case: Case, options: BenchOptions, folder: str) -> list[str]:
    """Return the command line of a run, without the program."""
    # By class_path, because the callback is constructed in the processes of the ranks.
    measures = {"class_path": "lightning_distrec.bench.measures.Measures"}
    measures_options = {"folder": folder, "warmup_steps": options.warmup_steps}
    # These override the YAML: limits other than max_steps are lifted, so that all cases make the same steps.
    trainer: dict[str, object] = {
        "strategy": case.strategy,
        "devices": case.devices,
        "num_nodes": 1,
        "max_steps": options.warmup_steps + options.steps,
        "max_epochs": -1,
        "max_time": "null",
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "enable_progress_bar": "false",
        "enable_model_summary": "false",
        "enable_checkpointing": "false",
        "logger": "false",
        "default_root_dir": folder,
        "callbacks": json.dumps([{**measures, "init_args": measures_options}]),
    }
    configs = [argument for config in options.configs for argument in ("--config", config)]
    return ["fit", *configs, *(f"--trainer.{name}={value}" for name, value in trainer.items())]


def summarize(ranks: Sequence[dict], devices: int, steps: int) -> MeasuredRun:
    """Return the measurements of a run. ranks: what the `Measures` of each rank wrote."""
    if len(ranks) != devices:
        return MeasuredRun(failure=f"{len(ranks)} of {devices} ranks wrote measurements")
    # Data may end on one rank before the others: steps that all have made count.
    seconds = [max(times) for times in zip(*(rank["seconds"] for rank in ranks), strict=False)]
    if not seconds:
        return MeasuredRun(failure=f"the data ended before {steps} steps were measured")
    samples = [sum(counts) for counts in zip(*(rank["samples"] for rank in ranks), strict=False) if None not in counts]
    per_second = sum(samples) / len(seconds) / statistics.median(seconds) if len(samples) == len(seconds) else None
    return MeasuredRun(
        step_seconds=statistics.median(seconds),
        samples_per_second=per_second,
        peak_bytes=max(rank["peak_bytes"] for rank in ranks),
    )


def failure_in(stderr: str, code: int) -> str:
    """Return why a run failed: our error in its stderr, else the last error, else the last line."""
    # Lines that end a traceback, also behind torch's prefix, as in '[rank1]: package.SomeError: message'.
    errors = re.findall(
        r"^\W*(?:\[?rank\W*\d+\]?:?\s*)?((?:\w+\.)*\w*(?:Error|Exception)): (.+)$", stderr, re.MULTILINE
    )
    # A RankError only repeats on one rank what another has raised, which is in the text too.
    package_errors = [
        text for name, text in errors if name.startswith("lightning_distrec.errors.") and "RankError" not in name
    ]
    if package_errors:
        return str(package_errors[0])
    if errors:
        return f"{errors[-1][0]}: {errors[-1][1]}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"the run ended with exit code {code}"
