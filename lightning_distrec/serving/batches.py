"""The tensors in a batch by name, and the same batch with other tensors in their places."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from lightning_distrec.errors import ConfigError

ONLY = "input"
"""The name of a batch that is one tensor."""


def tensors_of(batch: Any) -> dict[str, Tensor]:
    """Return the tensors in nested dicts, sequences, dataclasses and TorchRec's jagged tensors, by their path."""
    found: dict[str, Tensor] = {}

    def note(name: str, tensor: Tensor) -> Tensor:
        found[name] = tensor
        return tensor

    _mapped(batch, "", note)
    return found


def with_tensors(batch: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return `batch` with other tensors. tensors: by the names that `tensors_of` gives them; left out: as they are."""
    return _mapped(batch, "", lambda name, tensor: tensors.get(name, tensor))


def _mapped(value: Any, path: str, of_tensor: Callable[[str, Tensor], Tensor]) -> Any:
    def inner(name: Any, item: Any) -> Any:
        return _mapped(item, f"{path}.{name}" if path else str(name), of_tensor)

    if isinstance(value, Tensor):
        return of_tensor(path or ONLY, value)
    if isinstance(value, Mapping):
        return {name: inner(name, item) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(inner(name, item) for name, item in zip(value._fields, value, strict=True)))
    if isinstance(value, (list, tuple)):
        return type(value)(inner(number, item) for number, item in enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: inner(name, getattr(value, name)) for name in names})
    if type(value).__module__.startswith("torchrec."):
        return _mapped_jagged(value, path, inner)
    return value


def _mapped_jagged(value: Any, path: str, inner: Callable[[str, Any], Any]) -> Any:
    from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

    if isinstance(value, KeyedTensor):
        return KeyedTensor(
            keys=value.keys(), length_per_key=value.length_per_key(), values=inner("values", value.values())
        )
    if not isinstance(value, (JaggedTensor, KeyedJaggedTensor)):
        return value
    if isinstance(value, KeyedJaggedTensor) and value.variable_stride_per_key():
        raise ConfigError(
            f"'{path or ONLY}' has features of unequal batch sizes, which cannot be exported for serving."
        )
    parts = {"values": inner("values", value.values()), "lengths": inner("lengths", value.lengths())}
    if value.weights_or_none() is not None:
        parts["weights"] = inner("weights", value.weights())
    return (
        KeyedJaggedTensor(keys=value.keys(), **parts) if isinstance(value, KeyedJaggedTensor) else JaggedTensor(**parts)
    )
