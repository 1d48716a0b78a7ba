"""Runs a recipe in turns, each in processes of its own by the console script; prints and draws what
ranks measured.

Under a launcher each of its ranks runs this, and starts its rank of every run.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from lightning_distrec.units import format_bytes, quantity, text_table


@dataclass(frozen=True)
class Case:
    """A strategy, or a variant of the job, on a number of devices."""

    strategy: str
    """Its name, or that of the fragment."""
    devices: int
    fragment: str = ""
    """A YAML that is laid over the job's, in place of a strategy by name."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is the same in all runs."""

    configs: tuple[str, ...]
    steps: int
    warmup_steps: int
    timeout_seconds: float
    samples_from: str | None = None
    synthetic: int | None = None
    """Samples per rank and step of random ids, in place of the job's data."""
    synthetic_ids: int = 1
    devices_by_node: tuple[int, int] | None = None
    """Under a launcher: devices on a node, and nodes."""


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
    problem: str = ""
    """Why the number of samples is unknown."""


def run(case: Case, options: BenchOptions, number: int = 0) -> MeasuredRun:
    """Run the recipe under one strategy without validation, checkpoints, loggers and callbacks.
    number: of the run."""
    with tempfile.TemporaryDirectory() as folder:
        # A process of its own, so that no process group, GPU memory or patch of a run reaches the
        # next.
        process = subprocess.Popen(
            [sys.executable, "-m", "lightning_distrec", *arguments(case, options, folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | separate_job(os.environ, number),
            # The ranks that it starts belong to the session's process group too, so that all can be
            # killed at once.
            start_new_session=True,
        )
        try:
            stderr = process.communicate(timeout=options.timeout_seconds)[1]
        except subprocess.TimeoutExpired:
            return MeasuredRun(failure=f"the run did not end within {options.timeout_seconds:g} s")
        finally:
            # Also where the run has ended: ranks of it may live on, and would slow down the next
            # run.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        if process.returncode:
            return MeasuredRun(failure=failure_in(stderr, process.returncode))
        files = list(Path(folder).glob("*.json"))
        return summarize(
            json.loads(files[0].read_text()) if files else [], case.devices, options.steps
        )


def separate_job(environ: Mapping[str, str], number: int) -> dict[str, str]:
    """Return variables by which the ranks of a run meet no rank of another run of the same
    launcher.

    Collective under torchrun. number: of the run.
    """
    if "SLURM_STEP_ID" in environ:
        return {"SLURM_RESTART_COUNT": str(number)}
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    from torch.distributed import TCPStore  # here, as it loads torch

    # Lightning's own strategies would find the keys of the run before in the store of torchrun's
    # agent.
    store = TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False)
    key = f"lightning_distrec/bench/{number}"
    if environ["RANK"] == "0":
        with socket.socket() as listener:
            listener.bind(("", 0))
            store.set(key, str(listener.getsockname()[1]))
    return {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": store.get(key).decode()}


def arguments(case: Case, options: BenchOptions, folder: str) -> list[str]:
    """Return the command line of a run, without the program."""
    # By class_path, because the callback is constructed in the processes of the ranks.
    measures = {"class_path": "lightning_distrec.observe.bench.measures.Measures"}
    measures_options = {
        "folder": folder,
        "warmup_steps": options.warmup_steps,
        "samples_from": options.samples_from,
    }
    # These override the YAML: limits other than max_steps are lifted, so that all cases make the
    # same steps.
    trainer: dict[str, object] = {
        "devices": case.devices if options.devices_by_node is None else options.devices_by_node[0],
        "num_nodes": 1 if options.devices_by_node is None else options.devices_by_node[1],
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
    files = [*options.configs, *([case.fragment] if case.fragment else [])]
    configs = [argument for config in files for argument in ("--config", config)]
    if not case.fragment:
        trainer["strategy"] = case.strategy
    data = []
    if options.synthetic is not None:
        numbers = {"batch_size": options.synthetic, "ids_per_feature": options.synthetic_ids}
        data = ["--data", "lightning_distrec.observe.bench.synthetic.SyntheticIds"]
        data += [f"--data.init_args.{name}={value}" for name, value in numbers.items()]
    return [
        "fit",
        "--debug",
        *configs,
        *data,
        *(f"--trainer.{name}={value}" for name, value in trainer.items()),
    ]


def summarize(ranks: Sequence[dict], devices: int, steps: int) -> MeasuredRun:
    """Return the measurements of a run. ranks: what the `Measures` of each rank wrote."""
    if len(ranks) != devices:
        return MeasuredRun(failure=f"{len(ranks)} of {devices} ranks wrote measurements")
    # Data may end on one rank before the others: steps that all have made count.
    per_step = zip(*[rank["seconds"] for rank in ranks], strict=False)
    seconds = list(map(max, per_step))
    if not seconds:
        return MeasuredRun(failure=f"the data ended before {steps} steps were measured")
    samples: list[Any] = []
    for rank in ranks:
        samples += rank["samples"][: len(seconds)]
    step_seconds = statistics.median(seconds)
    per_second = None
    if None not in samples:
        per_second = sum(samples) / len(seconds) / step_seconds
    problems = [rank["problem"] for rank in ranks if rank["problem"]]
    return MeasuredRun(
        step_seconds=step_seconds,
        samples_per_second=per_second,
        peak_bytes=max(rank["peak_bytes"] for rank in ranks),
        problem=problems[0] if problems else "",
    )


def failure_in(stderr: str, code: int) -> str:
    """Return why a run failed: our error in its stderr, else the last error, else the last line."""
    # Lines that end a traceback, also behind torch's prefix, as in '[rank1]: package.SomeError:
    # message'.
    errors = re.findall(
        r"^\W*(?:\[?rank\W*\d+\]?:?\s*)?((?:\w+\.)*\w*(?:Error|Exception)): (.+)$",
        stderr,
        re.MULTILINE,
    )
    # A RankError only repeats on one rank what another has raised, which is in the text too.
    package_errors = []
    for name, text in errors:
        if name.startswith("lightning_distrec.errors.") and "RankError" not in name:
            package_errors.append(text)
    if package_errors:
        return str(package_errors[0])
    if errors:
        return f"{errors[-1][0]}: {errors[-1][1]}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"the run ended with exit code {code}"


@dataclass(frozen=True)
class Result:
    """The runs of one strategy on one number of devices."""

    case: Case
    runs: list[MeasuredRun] = field(default_factory=list)

    @property
    def failure(self) -> str:
        """Why the first failed round failed; "" if all rounds were measured."""
        return next((run.failure for run in self.runs if run.failure), "")

    @property
    def step_seconds(self) -> float:
        """Median of the rounds' medians."""
        return statistics.median(run.step_seconds for run in self.runs)

    @property
    def samples_per_second(self) -> float | None:
        """Median of the rounds."""
        numbers = []
        for run in self.runs:
            if run.samples_per_second is not None:
                numbers.append(run.samples_per_second)
        # Of all rounds or of none, so that it goes with the time, which is over all rounds.
        return statistics.median(numbers) if len(numbers) == len(self.runs) else None

    @property
    def peak_bytes(self) -> int:
        """Peak memory over all ranks and rounds."""
        return max(run.peak_bytes for run in self.runs)


def run_rounds(
    cases: Sequence[Case],
    options: BenchOptions,
    rounds: int,
    log: Callable[[str], None],
    run_case: Callable[..., MeasuredRun] = run,
) -> list[Result]:
    """Run all cases one after the other, `rounds` times: what slows the machine for a while slows
    all of them."""
    results = list(map(Result, cases))
    numbers = itertools.count()
    for number in range(rounds):
        for result in results:
            # counted alike on all ranks of a launcher, whatever has failed
            run_number = next(numbers)
            # It would fail again, perhaps after the whole timeout.
            if result.failure:
                continue
            case = result.case
            log(f"round {number + 1} of {rounds}: {case.strategy} on {case.devices}")
            result.runs.append(run_case(case, options, run_number))
            if result.failure:
                log(f"  not measured: {result.failure}")
    return results


def efficiency(result: Result, results: Sequence[Result]) -> float | None:
    """Return samples per second and device, relative to the same strategy on the smallest number of
    devices.

    A strategy that was measured on one number alone, as a pipeline may be, is compared with the
    first one on fewer.
    """
    measured = [r for r in results if not r.failure and r.samples_per_second]
    if result not in measured:
        return None
    # The smallest need not be one device, where the module may not fit.
    first = min(
        (r for r in measured if r.case.strategy == result.case.strategy),
        key=lambda r: r.case.devices,
    )
    if sum(r.case.strategy == result.case.strategy for r in measured) == 1:
        fewest = min(r.case.devices for r in measured)
        if fewest == result.case.devices:
            return None
        first = next(r for r in measured if r.case.devices == fewest)
    return _speed(result) / _speed(first)


def _speed(result: Result) -> float:
    return (result.samples_per_second or 0.0) / result.case.devices


def as_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return all results as plain values."""
    values = []
    for result in results:
        entry: dict[str, Any] = {
            "strategy": result.case.strategy,
            "devices": result.case.devices,
            "failure": result.failure or None,
        }
        if not result.failure:
            entry |= {
                "step_ms": 1000 * result.step_seconds,
                "step_ms_by_round": [1000 * run.step_seconds for run in result.runs],
                "samples_per_second": result.samples_per_second,
                "peak_bytes": result.peak_bytes,
                "efficiency": efficiency(result, results),
            }
        values.append(entry)
    return values


FEW_STEPS = 20
"""With fewer, one slow step moves the median."""
MAX_EFFICIENCY = 1.1
"""More than this is a fault of the comparison, not a gain."""


def print_results(results: Sequence[Result], steps: int, console: Console) -> None:
    """Print one row per strategy and number of devices."""
    # A case that has failed has fewer runs than others.
    rounds = max(len(result.runs) for result in results)
    text = text_table(
        ("strategy", "devices", "step, ms", "samples/s", "efficiency", "peak memory per rank"),
        ["strategy"],
        title=f"Medians over {quantity(steps, 'step')} and {quantity(rounds, 'round')}",
        caption="In parentheses: fastest and slowest round. Memory on a CPU is that of the "
        "process, with libraries.",
    )
    for result in results:
        name = result.case.strategy
        devices = str(result.case.devices)
        if result.failure:
            text.add_row(name, devices, "not measured", "", "", "")
            continue
        share = efficiency(result, results)
        times = sorted(1000 * run.step_seconds for run in result.runs)
        extremes = f" ({times[0]:.1f} to {times[-1]:.1f})" if len(times) > 1 else ""
        text.add_row(
            name,
            devices,
            f"{1000 * result.step_seconds:.1f}{extremes}",
            "-" if result.samples_per_second is None else f"{result.samples_per_second:,.0f}",
            "-" if share is None else f"{share:.0%}",
            format_bytes(result.peak_bytes),
        )
    console.print(text)
    for result in results:
        if result.failure:
            console.print(f"{result.case.strategy} on {result.case.devices}: {result.failure}")
    for line in doubts(results, steps):
        console.print(line)


def doubts(results: Sequence[Result], steps: int) -> list[str]:
    """Return why the figures may mislead: too few steps, or an efficiency that no machine has."""
    lines = []
    problems: set[str] = set()
    for result in results:
        problems |= {run.problem for run in result.runs if run.problem}
    if problems:
        problem = min(problems).replace("samples per", "Samples per", 1)
        lines.append(f"{problem} Here: --samples-from.")
    if steps < FEW_STEPS:
        lines.append(
            f"A median of {quantity(steps, 'step')} says little: --steps {FEW_STEPS} or more."
        )
    # Another strategy may well be faster than one device.
    names = Counter(result.case.strategy for result in results if not result.failure)
    beyond = []
    for result in results:
        share = efficiency(result, results)
        if names[result.case.strategy] > 1 and share is not None and share > MAX_EFFICIENCY:
            beyond.append(f"{result.case.strategy} on {result.case.devices} ({share:.0%})")
    if beyond:
        lines.append(
            f"Efficiency above {MAX_EFFICIENCY:.0%}: {', '.join(beyond)}. Something slowed down "
            "the run on the fewest devices, such as another program. Measure again with more "
            "--steps and --rounds."
        )
    return lines


def draw(results: Sequence[Result], file: Path) -> None:
    """Draw samples per second, peak memory and efficiency into a file, as a bar for each case."""
    # matplotlib is optional. A Figure without pyplot needs no display, and leaves no figure open.
    from matplotlib.figure import Figure

    measured = [result for result in reversed(results) if not result.failure]
    shares = [efficiency(result, results) for result in measured]
    panels = {
        "samples per second": [result.samples_per_second or 0.0 for result in measured],
        "peak memory per rank, MiB": [result.peak_bytes / 2**20 for result in measured],
        "efficiency, %": [100 * (share or 0.0) for share in shares],
    }
    labels = [f"{result.case.strategy} on {result.case.devices}" for result in measured]
    numbers_of_devices = sorted({result.case.devices for result in results})
    colours = [f"C{numbers_of_devices.index(result.case.devices)}" for result in measured]
    figure = Figure(figsize=(12, 1.2 + 0.3 * len(measured)), layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True)
    for axes, (title, numbers) in zip(all_axes, panels.items(), strict=True):
        bars = axes.barh(labels, numbers, color=colours)
        texts = [f"{number:,.0f}" if number else "" for number in numbers]
        axes.bar_label(bars, texts, padding=2, fontsize=8)
        axes.margins(x=0.15)
        axes.set_title(title)
    figure.savefig(file)
