"""The command `bench`: measures a recipe under several strategies and numbers of devices."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from lightning_distrec.bench.results import NO_MATPLOTLIB, Result, as_json, can_draw, draw, print_results, run_rounds
from lightning_distrec.bench.runs import BenchOptions, Case
from lightning_distrec.cli.output import EXIT_NEGATIVE, EXIT_OK, console, exit_on_sigterm
from lightning_distrec.errors import ConfigError, did_you_mean

STRATEGIES = ("ddp_tuned", "fsdp_tuned", "torchrec_sharded", "ddp", "auto")


def parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    parser = ArgumentParser(
        prog="lightning-distrec bench",
        description="Measure a recipe under several strategies and numbers of devices. The cases run in turns for a "
        "few steps each, without the recipe's callbacks, loggers and checkpoints. Exit code 1: no case could be "
        "measured.",
    )
    add = parser.add_argument
    add("--config", type=str, action="append", help="Read this YAML file, as fit does; repeat to merge several.")
    add("--strategies", type=str, default="ddp_tuned,fsdp_tuned,torchrec_sharded", help="Measure these strategies.")
    add("--devices", type=str, default="1,2", help="Measure on these numbers of devices.")
    add("--steps", type=int, default=30, help="Measure this many steps of each run.")
    add("--warmup", type=int, default=5, help="Run this many steps before measuring.")
    add("--rounds", type=int, default=3, help="Run each case this many times.")
    add("--timeout", type=float, default=600.0, help="Stop a run after this many seconds.")
    add("--out", type=str, default="bench", help="Write results.json and results.png to this folder.")
    return parser


def run(options: Namespace) -> int:
    """Run the command and return its exit code."""
    with exit_on_sigterm():  # so that no run outlives this process
        results = bench(options, lambda line: print(line, file=sys.stderr, flush=True))
    print_results(results, options.steps, console())
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(as_json(results), indent=1))
    if all(result.failure for result in results):
        return EXIT_NEGATIVE
    if can_draw():
        draw(results, folder / "results.png")
    else:
        print(f"lightning-distrec: {NO_MATPLOTLIB}", file=sys.stderr)
    return EXIT_OK


def bench(options: Namespace, log: Callable[[str], None]) -> list[Result]:
    """Run all cases that the options ask for. Raises ConfigError, before the first run."""
    if not options.config:
        raise ConfigError("bench: --config is missing. Give it the YAML file that fit would get.")
    for config in options.config:
        if not Path(config).is_file():
            raise ConfigError(f"--config {config}: there is no such file.")
    for name, minimum in (("steps", 1), ("warmup", 0), ("rounds", 1)):
        if options[name] < minimum:
            raise ConfigError(f"--{name} {options[name]}: must be at least {minimum}.")
    if options.timeout <= 0:
        raise ConfigError(f"--timeout {options.timeout:g}: must be above 0 seconds.")
    run_options = BenchOptions(
        configs=tuple(options.config),
        steps=options.steps,
        warmup_steps=options.warmup,
        timeout_seconds=options.timeout,
    )
    strategies, devices = parse_strategies(options.strategies), parse_devices(options.devices)
    cases = [Case(strategy, number) for strategy in strategies for number in devices]
    return run_rounds(cases, run_options, options.rounds, log)


def parse_strategies(text: str) -> list[str]:
    """Return the names in "a,b". Raises ConfigError: one is unknown."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in STRATEGIES:
            raise ConfigError(
                f"--strategies {text}: unknown strategy {name!r}{did_you_mean(name, STRATEGIES)} "
                f"Use some of {', '.join(STRATEGIES)}, separated by commas."
            )
    if not names:
        raise ConfigError(f"--strategies {text!r}: name at least one strategy.")
    return list(dict.fromkeys(names))


def parse_devices(text: str) -> list[int]:
    """Return the numbers in "1,2". Raises ConfigError: one is not a number above 0."""
    numbers = [number.strip() for number in text.split(",") if number.strip()]
    if not numbers or any(not number.isdecimal() or not int(number) for number in numbers):
        raise ConfigError(f"--devices {text!r}: give numbers above 0, separated by commas, such as 1,2.")
    return sorted({int(number) for number in numbers})
