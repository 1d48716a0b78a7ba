"""The command `bench`: what its options say, checked before anything runs."""

from collections.abc import Callable
from pathlib import Path

from jsonargparse import Namespace

from lightning_distrec.bench.rounds import Result, run_rounds
from lightning_distrec.bench.runs import Case, Wanted
from lightning_distrec.errors import ConfigError, did_you_mean

STRATEGIES = ("ddp_tuned", "fsdp_tuned", "torchrec_sharded", "ddp", "auto")


def bench(given: Namespace, tell: Callable[[str], None]) -> list[Result]:
    """Run what the command line asks for. Raises ConfigError, before anything has run."""
    if not given.config:
        raise ConfigError("bench: no --config is given. Name the YAML that `fit` would be given.")
    for config in given.config:
        if not Path(config).is_file():
            raise ConfigError(f"--config {config}: there is no such file.")
    for name, least in (("steps", 1), ("warmup", 0), ("rounds", 1)):
        if given[name] < least:
            raise ConfigError(f"--{name} {given[name]}: must be at least {least}.")
    if given.timeout <= 0:
        raise ConfigError(f"--timeout {given.timeout:g}: must be above 0 seconds.")
    wanted = Wanted(
        configs=tuple(given.config), steps=given.steps, warmup_steps=given.warmup, timeout_seconds=given.timeout
    )
    cases = [Case(name, devices) for name in strategies_of(given.strategies) for devices in devices_of(given.devices)]
    return run_rounds(cases, wanted, given.rounds, tell)


def strategies_of(text: str) -> list[str]:
    """Return the names in "a,b". Raises ConfigError: one is not known."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in STRATEGIES:
            raise ConfigError(
                f"--strategies {text}: {name!r} is not known{did_you_mean(name, STRATEGIES)} "
                f"Use some of {', '.join(STRATEGIES)}, with commas between them."
            )
    if not names:
        raise ConfigError(f"--strategies {text!r}: at least one is needed.")
    return list(dict.fromkeys(names))


def devices_of(text: str) -> list[int]:
    """Return the numbers in "1,2". Raises ConfigError: one is none, or not above 0."""
    numbers = [part.strip() for part in text.split(",") if part.strip()]
    if not numbers or any(not number.isdecimal() or not int(number) for number in numbers):
        raise ConfigError(f"--devices {text!r}: numbers above 0 are needed, with commas between them, such as 1,2.")
    return sorted({int(number) for number in numbers})
