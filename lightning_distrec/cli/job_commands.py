"""The commands around a job: `bench` measures recipes, `doctor` checks ranks and machines, `slurm`
writes a script."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jsonargparse import Namespace

from lightning_distrec.cli.batch_script import BatchJob, batch_script
from lightning_distrec.cli.command_line import (
    EXIT_NEGATIVE,
    EXIT_OK,
    check_options,
    console,
    exit_on_sigterm,
)
from lightning_distrec.errors import ConfigError, did_you_mean, require
from lightning_distrec.observe.bench.results import (
    BenchOptions,
    Case,
    Result,
    as_json,
    draw,
    print_results,
    run_rounds,
)
from lightning_distrec.registration import STRATEGIES

if TYPE_CHECKING:
    from lightning_distrec.cluster.launched import Launched

YAML = (".yaml", ".yml")
NAMES = (*STRATEGIES, "ddp", "ddp_find_unused_parameters_true", "auto")
"""Strategies that train a module unchanged."""


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_bench(options: Namespace) -> int:
    """Run the command and return its exit code."""
    from lightning_distrec.cluster.environment import find_launched  # loads torch

    launched = find_launched()
    with exit_on_sigterm():  # so that no run outlives this process
        results = bench(options, launched)
    if launched is not None and launched.rank:
        return EXIT_OK
    print_results(results, options.steps, console())
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    # Also where all have failed: it holds the reasons.
    (folder / "results.json").write_text(json.dumps(as_json(results), indent=1))
    if all(result.failure for result in results):
        return EXIT_NEGATIVE
    draw(results, folder / "results.png")
    return EXIT_OK


def bench(options: Namespace, launched: "Launched | None" = None) -> list[Result]:
    """Run all cases that the options ask for. Raises ConfigError, before the first run.

    launched: this process's place among ranks that a launcher has started; then each of these
    benches.
    """
    check_options(options, "bench", steps=1, warmup=0, rounds=1, synthetic=1, synthetic_ids=1)
    require("matplotlib", "bench, for results.png")
    for config in options.config:
        if not Path(config).is_file():
            raise ConfigError(f"--config {config}: there is no such file.")
    if options.timeout <= 0:
        raise ConfigError(f"--timeout {options.timeout:g}: must be above 0 seconds.")
    run_options = BenchOptions(
        configs=tuple(options.config),
        steps=options.steps,
        warmup_steps=options.warmup,
        timeout_seconds=options.timeout,
        samples_from=options.samples_from,
        synthetic=options.synthetic,
        synthetic_ids=options.synthetic_ids,
        devices_by_node=None
        if launched is None
        else (launched.local_num_ranks, launched.num_nodes),
    )
    strategies = parse_strategies(options.strategies)
    devices = parse_devices(options.devices or "1,2")
    if launched is not None:
        if launched.launcher != "torchrun" and not launched.is_step:
            raise ConfigError(
                f"bench: start it by srun, by torchrun or alone, not by {launched.launcher}."
            )
        if options.devices:
            raise ConfigError(
                f"--devices {options.devices}: {launched.launcher} has started the ranks. Leave it "
                "out."
            )
        devices = [launched.num_ranks]
    cases = []
    for name in strategies:
        for number in devices:
            cases.append(
                Case(Path(name).stem, number, name) if name.endswith(YAML) else Case(name, number)
            )
    log = _log if launched is None or launched.rank == 0 else lambda line: None
    return run_rounds(cases, run_options, options.rounds, log)


def parse_strategies(text: str) -> list[str]:
    """Return the names and YAML files in "a,b.yaml". Raises ConfigError: one is unknown."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name.endswith(YAML) and not Path(name).is_file():
            raise ConfigError(f"--strategies {text}: there is no file {name}.")
        if name not in NAMES and not name.endswith(YAML):
            raise ConfigError(
                f"--strategies {text}: unknown strategy {name!r}{did_you_mean(name, NAMES)} Use "
                f"some of {', '.join(NAMES)}, or YAML files to lay over the job's, separated by "
                "commas."
            )
    if not names:
        raise ConfigError(f"--strategies {text!r}: name at least one strategy.")
    return list(dict.fromkeys(names))


def parse_devices(text: str) -> list[int]:
    """Return the numbers in "1,2". Raises ConfigError: one is not a number above 0."""
    numbers = [number.strip() for number in text.split(",") if number.strip()]
    if not numbers or any(not number.isdecimal() or not int(number) for number in numbers):
        raise ConfigError(
            f"--devices {text!r}: give numbers above 0, separated by commas, such as 1,2."
        )
    return sorted(set(map(int, numbers)))


def run_doctor(options: Namespace) -> int:
    """Run the command and return its exit code."""
    # These load torch, which `slurm` need not wait for.
    from lightning_distrec.cluster.environment import find_launched
    from lightning_distrec.observe.doctor import as_json, examine, find_problems, print_diagnosis

    findings = examine(Path(options.folder).absolute(), options.timeout, _log)
    problems = find_problems(findings)
    launched = find_launched()
    if launched is None or launched.rank == 0:
        if options.json:
            print(json.dumps(as_json(findings, problems), indent=1))
        else:
            print_diagnosis(findings, problems, console())
    # All ranks have all findings: the launcher sees one exit code.
    return EXIT_NEGATIVE if any(problem.kind == "error" for problem in problems) else EXIT_OK


def run_slurm(options: Namespace) -> int:
    """Run the command and return its exit code."""
    # The options have the names of BatchJob's fields, but for --out and --config.
    fields = {name: value for name, value in vars(options).items() if name != "out"}
    for name in ("config", "setup", "sbatch", "overrides"):
        fields[name] = tuple(fields[name] or ())
    fields["configs"] = fields.pop("config")
    text = batch_script(BatchJob(**fields))
    if options.out == "-":
        print(text, end="")
    else:
        # Not over a script that a user may have changed.
        with open(options.out, "x") as file:
            file.write(text)
        print(f"Wrote {options.out}. Submit it with: sbatch {options.out}")
    return EXIT_OK
