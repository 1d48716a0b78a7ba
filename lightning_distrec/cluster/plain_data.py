"""Values that ranks send each other, as JSON: reading them runs no code, whoever sent them.

`torch.distributed.all_gather_object` sends pickles, and unpickling runs what the sender asks for.
Plain values, tensors, and dataclasses of this package are sent; a dataclass is made by its
constructor, from fields that were read in the same way.
"""

import base64
import dataclasses
import json
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

PACKAGE = __name__.partition(".")[0]
TAG = "type"
SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def to_bytes(value: Any) -> bytes:
    """Return a value as bytes. Raises TypeError: it holds something that cannot be sent."""
    return json.dumps(_encode(value), separators=(",", ":")).encode()


def from_bytes(data: bytes) -> Any:
    """Return the value that `to_bytes` was given. Raises ValueError: these are not bytes that it
    returns."""
    try:
        return _decode(json.loads(data))
    except (KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"not a value that a rank sends: {error}") from error


def _encode(value: Any) -> Any:
    kind = type(value)
    # By the exact type: a subclass, such as an enum of strings, would come back as something else.
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_encode(item) for item in value]
    if isinstance(value, Mapping):
        # As pairs: JSON's keys are texts, and a dict's may be tuples or ints.
        return {
            TAG: "dict",
            "items": [[_encode(key), _encode(item)] for key, item in value.items()],
        }
    if isinstance(value, bytes):
        return {TAG: "bytes", "base64": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        values = value.detach().cpu().contiguous()
        # As bytes, since numpy has no bfloat16; in one dimension, since a scalar cannot be viewed
        # in another size.
        raw = values.reshape(-1).view(torch.uint8).numpy().tobytes() if values.numel() else b""
        return {
            TAG: "tensor",
            "dtype": _dtype_name(value.dtype),
            "shape": list(value.shape),
            "values": _encode(raw),
        }
    if isinstance(value, torch.dtype):
        return {TAG: "dtype", "name": _dtype_name(value)}
    if isinstance(value, torch.device):
        return {TAG: "device", "name": str(value)}
    # Those of ints and texts equal their plain values, and are sent as these.
    if isinstance(value, Enum) and not isinstance(value, int | str):
        return {TAG: "enum", "class": _class_name(kind), "name": value.name}
    if dataclasses.is_dataclass(kind):
        fields = {
            field.name: _encode(getattr(value, field.name))
            for field in dataclasses.fields(kind)
            if field.init
        }
        return {TAG: "dataclass", "class": _class_name(kind), "fields": fields}
    return _encode_library_value(value)


def _encode_library_value(value: Any) -> Any:
    """Return a tuple, a set, a path or a value of numpy; its subclasses, such as torch.Size, lose
    their class."""
    for name, sequence in SEQUENCES.items():
        if isinstance(value, sequence):
            return {TAG: name, "items": [_encode(item) for item in value]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return {TAG: "array", "tensor": _encode(torch.tensor(value))}
    if isinstance(value, np.generic):
        return _encode(value.item())
    for kind, plain in ((int, int), (float, float), (str | PurePath, str)):
        if isinstance(value, kind):
            return plain(value)
    if isinstance(value, list):
        return [_encode(item) for item in value]
    raise TypeError(f"a value of type {type(value).__name__} cannot be sent to other ranks")


def _decode(data: Any) -> Any:
    if isinstance(data, list):
        return [_decode(item) for item in data]
    if not isinstance(data, dict):
        return data
    kind = data[TAG]
    if kind == "dict":
        return {_decode(key): _decode(item) for key, item in data["items"]}
    if kind in SEQUENCES:
        return SEQUENCES[kind](_decode(item) for item in data["items"])
    if kind == "bytes":
        return base64.b64decode(data["base64"])
    if kind == "tensor":
        empty = torch.empty(data["shape"], dtype=_find_dtype(data["dtype"]))
        raw = bytearray(_decode(data["values"]))  # bytes are read-only, which torch warns of
        if len(raw) != empty.numel() * empty.element_size():
            raise ValueError("a tensor has other values than its shape says")
        return torch.frombuffer(raw, dtype=empty.dtype).reshape(empty.shape) if raw else empty
    if kind == "array":
        return _decode(data["tensor"]).numpy()
    if kind == "dtype":
        return _find_dtype(data["name"])
    if kind == "device":
        return torch.device(data["name"])
    if kind == "enum":
        return _find_class(data["class"], Enum)[data["name"]]
    if kind == "dataclass":
        cls = _find_class(data["class"], object)
        # The constructor computes the fields that it does not take.
        names = {field.name for field in dataclasses.fields(cls) if field.init}
        return cls(**{
            name: _decode(item) for name, item in data["fields"].items() if name in names
        })
    return _refuse(kind)


def _refuse(kind: object) -> NoReturn:
    raise ValueError(f"not a value that a rank sends: a {kind}")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _find_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    return dtype if isinstance(dtype, torch.dtype) else _refuse(name)


def _class_name(cls: type) -> list[str]:
    if cls.__module__.partition(".")[0] != PACKAGE:
        raise TypeError(f"a {cls.__name__} of {cls.__module__} cannot be sent to other ranks")
    return [cls.__module__, cls.__qualname__]


def _find_class(name: list[str], base: type) -> Any:
    """Return a dataclass or an enum of this package, where its module is loaded; nothing is
    imported."""
    module, qualified = name
    cls: Any = sys.modules[module] if module.partition(".")[0] == PACKAGE else _refuse(module)
    # By vars and not getattr: names that a class inherits, or computes, lead out of the package.
    for word in qualified.split("."):
        cls = vars(cls)[word]
    is_ours = isinstance(cls, type) and cls.__module__ == module and cls.__qualname__ == qualified
    if not (is_ours and issubclass(cls, base) and (base is Enum or dataclasses.is_dataclass(cls))):
        _refuse(qualified)
    return cls
