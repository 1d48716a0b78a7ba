"""Options that may be given as an object of ours or, as YAML has them, as a dict."""

from dataclasses import fields
from typing import Any, TypeVar

from lightning_distrec.errors import ConfigError

T = TypeVar("T")


def chosen(what: str, kind: type[T], given: T | dict[str, Any] | None) -> T:
    """Return the options of the argument `what`, the defaults of `kind` for None.

    Raises ConfigError: one of them is not known, or has a value it cannot have.
    """
    if isinstance(given, kind):
        return given
    options: dict[str, Any] = given or {}  # type: ignore[assignment]
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigError(f"{what}: {', '.join(unknown)} is not known. It takes {' and '.join(known)}.")
    return kind(**options)
