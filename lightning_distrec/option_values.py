"""Checks and reads the values of options, which come from Python, from YAML as dicts, or from the
environment."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from datetime import timedelta
from enum import Enum
from functools import cache
from itertools import repeat
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from lightning_distrec.errors import ConfigError, did_you_mean

T = TypeVar("T")

TIMEOUT = "PROCESS_GROUP_TIMEOUT_SECONDS"
"""Says what `timeout_seconds` does where the argument does not. TorchEasyRec reads it too."""
DEFAULT_TIMEOUT_SECONDS = 1800.0


def plain(value: Any) -> Any:
    """Return a value of numpy as Python's own, an enum's member as its value; in containers too."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    return type(value)(map(plain, value)) if type(value) in (list, tuple) else value


def plain_fields(options: Any) -> None:
    """Let the fields of a dataclass hold plain values. Called first in its __post_init__.

    Raises ConfigError: a value is not of its field's type.
    """
    kind = type(options)
    # Many tables have options of their own, of which few are set.
    given = {
        name: plain(value)
        for name, value in vars(options).items()
        if value is not vars(kind).get(name, MISSING)
    }
    for name, value in given.items():
        object.__setattr__(options, name, value)
    check_types(given, kind, f"{kind.__name__}: ")


type_hints = cache(get_type_hints)


def check_types(values: Mapping[str, Any], annotated: Any, prefix: str = "") -> None:
    """Raise ConfigError: a value is not of the type that a class or a function has for its name.

    prefix: of the name in the error.
    """
    for name, value in values.items():
        hint = type_hints(annotated)[name]
        if _fits(plain(value), hint):
            continue
        alternatives = get_args(hint) if get_origin(hint) in _UNIONS else (hint,)
        kinds = [kind for kind in alternatives if kind is not NoneType]
        if isinstance(value, str) and get_origin(kinds[0]) is Literal and not kinds[1:]:
            check_choice(f"{prefix}{name}", value, get_args(kinds[0]))
        words = ", or ".join(map(_in_words, kinds))
        text_hint = f": write [{value!r}]" if "a list" in words else ", not a text"
        end = text_hint if isinstance(value, str) else ""
        raise ConfigError(f"{prefix}{name}={value!r}: must be {words}{end}.")


def _fits(value: Any, kind: Any) -> bool:
    arguments = get_args(kind)
    origin = get_origin(kind) or kind
    if origin in _UNIONS:
        return any(_fits(value, alternative) for alternative in arguments)
    if origin is Literal:
        return repr(value) in map(repr, arguments)  # True is no 1
    # or an object of TorchRec's, or a dict, whose options are checked where they are read
    if is_dataclass(origin):
        return is_dataclass(value) or isinstance(value, Mapping)
    if origin in (dict, Mapping):
        is_mapping = isinstance(value, Mapping)
        return (
            is_mapping
            and all(map(_fits, value, repeat(arguments[0])))
            and all(map(_fits, value.values(), repeat(arguments[1])))
        )
    if origin in (list, tuple):
        return isinstance(value, (list, tuple)) and all(_fits(part, arguments[0]) for part in value)
    if isinstance(value, bool):
        return origin in (bool, Any)
    return origin is Any or isinstance(value, (int, float) if origin is float else origin)


_UNIONS = (Union, UnionType)
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    dict: "a dict",
}


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(map(repr, get_args(kind)))
    return _WORDS.get(get_origin(kind) or kind, "options")


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise ConfigError: the value of option `name` is none of the choices."""
    allowed = tuple(choices)
    if value not in allowed:
        near = did_you_mean(value, map(str, allowed)) if isinstance(value, str) else "."
        raise ConfigError(
            f"{name}={value!r} is not known{near} Use one of {', '.join(map(repr, allowed))}."
        )


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
            raise ConfigError(
                f"{argument}: there is no option {name!r}{near} Use some of {', '.join(names)}."
            )
    return kind(**options)


def parse_timeout(timeout_seconds: float | None, variables: Mapping[str, str]) -> timedelta:
    """Return how long a rank waits: by the argument, or else by the environment, or else half an
    hour.

    Raises ConfigError: it is no number above 0.
    """
    name = "timeout_seconds"
    value = str(timeout_seconds)
    if timeout_seconds is None:
        name = TIMEOUT
        value = variables.get(TIMEOUT, "").strip() or str(DEFAULT_TIMEOUT_SECONDS)
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"{name}={value}: must be a number of seconds above 0.")
    return timedelta(seconds=seconds)
