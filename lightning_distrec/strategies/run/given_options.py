"""Options that a strategy takes as an object of ours, from YAML as a dict, or from the environment."""

from collections.abc import Mapping
from dataclasses import fields
from datetime import timedelta
from typing import Any, TypeVar

from lightning_distrec.errors import ConfigError

T = TypeVar("T")

TIMEOUT = "PROCESS_GROUP_TIMEOUT_SECONDS"
"""Says what `timeout_seconds` does where the argument does not. TorchEasyRec reads it too."""
DEFAULT_TIMEOUT_SECONDS = 1800.0


def as_options(argument: str, kind: type[T], value: T | dict[str, Any] | None) -> T:
    """Return the options given for an argument of the strategy; None means the defaults of `kind`.

    Raises ConfigError: an option is unknown, or has an invalid value.
    """
    if isinstance(value, kind):
        return value
    options: dict[str, Any] = value or {}  # type: ignore[assignment]
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(set(options) - set(names))
    if unknown:
        raise ConfigError(f"{argument}: {', '.join(unknown)} is not known. It takes {' and '.join(names)}.")
    return kind(**options)


def chosen_timeout(timeout_seconds: float | None, variables: Mapping[str, str]) -> timedelta:
    """Return how long a rank waits: as given, or else by the environment, or else half an hour.

    Raises ConfigError: it is no number above 0.
    """
    variable = variables.get(TIMEOUT, "").strip()
    name, value = ("timeout_seconds", timeout_seconds) if timeout_seconds is not None else (TIMEOUT, variable or DEFAULT_TIMEOUT_SECONDS)
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{name}={value}: must be a number of seconds above 0.")
    return timedelta(seconds=seconds)
