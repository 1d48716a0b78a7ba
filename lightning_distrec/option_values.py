"""Checks and reads the values of options, which come from Python, from YAML as dicts, or from the environment."""

from collections.abc import Iterable, Mapping
from dataclasses import fields
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np

from lightning_distrec.errors import ConfigError, did_you_mean

T = TypeVar("T")

TIMEOUT = "PROCESS_GROUP_TIMEOUT_SECONDS"
"""Says what `timeout_seconds` does where the argument does not. TorchEasyRec reads it too."""
DEFAULT_TIMEOUT_SECONDS = 1800.0


def plain(value: Any) -> Any:
    """Return a value of numpy as Python's own, in containers too: `frame.item.max() + 1` is a number as any other."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def plain_fields(options: Any) -> None:
    """Let the fields of a dataclass hold plain values. Called first in its __post_init__."""
    for name, value in vars(options).items():
        object.__setattr__(options, name, plain(value))


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise ConfigError: the value of option `name` is none of the choices."""
    if value not in (allowed := tuple(choices)):
        near = did_you_mean(value, map(str, allowed)) if isinstance(value, str) else "."
        raise ConfigError(f"{name}={value!r} is not known{near} Use one of {', '.join(map(repr, allowed))}.")


def as_options(argument: str, kind: type[T], value: T | Mapping[str, Any] | None) -> T:
    """Return the options that an argument of the strategy holds; None means the defaults of `kind`.

    Raises ConfigError: an option is unknown, or has an invalid value.
    """
    if isinstance(value, kind):
        return value
    options = {} if value is None else value
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(options, Mapping):
        raise ConfigError(f"{argument}={value!r}: options are needed, some of {', '.join(names)}.")
    for name in options:
        if name not in names:
            near = did_you_mean(str(name), names)
            raise ConfigError(f"{argument}: there is no option {name!r}{near} Use some of {', '.join(names)}.")
    return kind(**options)


def parse_timeout(timeout_seconds: float | None, variables: Mapping[str, str]) -> timedelta:
    """Return how long a rank waits: by the argument, or else by the environment, or else half an hour.

    Raises ConfigError: it is no number above 0.
    """
    name, value = "timeout_seconds", str(timeout_seconds)
    if timeout_seconds is None:
        name, value = TIMEOUT, variables.get(TIMEOUT, "").strip() or str(DEFAULT_TIMEOUT_SECONDS)
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{name}={value}: must be a number of seconds above 0.")
    return timedelta(seconds=seconds)
