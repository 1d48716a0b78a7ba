"""Options that a strategy takes as an object of ours or, from YAML, as a dict."""

from dataclasses import fields
from typing import Any, TypeVar

from lightning_distrec.errors import ConfigError

T = TypeVar("T")


def as_options(argument: str, kind: type[T], given: T | dict[str, Any] | None) -> T:
    """Return the options given for an argument of the strategy; None means the defaults of `kind`.

    Raises ConfigError: an option is unknown, or has an invalid value.
    """
    if isinstance(given, kind):
        return given
    options: dict[str, Any] = given or {}  # type: ignore[assignment]
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"{argument}: {', '.join(unknown)} is not known. It takes {' and '.join(known)}.")
    return kind(**options)
