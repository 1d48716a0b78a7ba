"""Looked up rows that are still on their way, as the types that the unsharded collection returns.

The exchange of rows is most of the traffic. It goes on while the user's code computes something else, until that code
first touches the rows; only then is it waited for.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from lightning_distrec import spans
from lightning_distrec._compat.torch import register_container
from lightning_distrec._compat.torchrec import JAGGED_TENSOR_FIELDS, KEYED_TENSOR_VALUES


class LazyOutput:
    """What a lookup returns once its rows are here.

    wait: waits for the exchange and returns the rows, in the unsharded order and types. It runs once, on the first
    touch, in the grad mode of the lookup, whatever the mode of the touch: rows that are first touched under no_grad may
    get a gradient later.
    """

    def __init__(self, wait: Callable[[], Any]) -> None:
        self._wait: Callable[[], Any] | None = wait
        self._with_gradient = torch.is_grad_enabled()
        self._begin = time.perf_counter()
        self._rows: Any = None

    @torch.compiler.disable
    def get(self) -> Any:
        """Return the rows, waiting for them if they are not here."""
        if self._wait is not None:
            wait, self._wait = self._wait, None
            spans.emit(spans.OUTPUT_DIST, self._begin, time.perf_counter())
            with torch.set_grad_enabled(self._with_gradient), spans.span(spans.WAIT_OUTPUT_DIST):
                self._rows = wait()
        return self._rows


class LazyKeyedTensor(KeyedTensor):
    """A KeyedTensor whose values arrive when they are first touched; then it is an ordinary KeyedTensor.

    arrival: of the Bags. Who asks for them by key gets them as they came, without a copy to put them side by side.
    """

    def __init__(self, keys: list[str], length_per_key: list[int], arrival: LazyOutput) -> None:
        super().__init__(keys, length_per_key, None)  # type: ignore[arg-type]
        self.__dict__["arrival"] = arrival

    def __getitem__(self, key: str) -> Tensor:
        """Return the bags of one key, (batch_size, width)."""
        column: Tensor = self.__dict__["arrival"].get().columns[key]
        return column

    def to_dict(self) -> dict[str, Tensor]:
        """Return the bags by key."""
        return dict(self.__dict__["arrival"].get().columns)


def _arrived_values(arriving: LazyKeyedTensor) -> Tensor:
    values: Tensor = arriving.__dict__["arrival"].get().values
    arriving.__class__ = KeyedTensor  # type: ignore[assignment]
    del arriving.__dict__["arrival"]
    arriving.__dict__[KEYED_TENSOR_VALUES] = values
    return values


def _no_values_yet(arriving: LazyKeyedTensor, _: Any) -> None:
    """KeyedTensor's constructor sets what there is not yet."""


setattr(LazyKeyedTensor, KEYED_TENSOR_VALUES, property(_arrived_values, _no_values_yet))


class LazyJaggedTensor(JaggedTensor):
    """One output of an EmbeddingCollection; all of them arrive when one is first touched.

    arrival: of all outputs by name.
    """

    def __init__(self, name: str, arrival: LazyOutput) -> None:
        self.__dict__ |= {"name": name, "arrival": arrival}  # not JaggedTensor's constructor, which looks at the parts

    def arrive(self) -> None:
        """Become an ordinary JaggedTensor."""
        rows: JaggedTensor = self.__dict__["arrival"].get()[self.__dict__["name"]]
        self.__class__ = JaggedTensor  # type: ignore[assignment]
        self.__dict__.clear()
        self.__dict__.update(vars(rows))


def _arrived_part(name: str) -> property:
    def part(arriving: LazyJaggedTensor) -> Any:
        arriving.arrive()
        return arriving.__dict__[name]

    return property(part)


for _name in JAGGED_TENSOR_FIELDS:
    setattr(LazyJaggedTensor, _name, _arrived_part(_name))

register_container(
    LazyKeyedTensor,
    lambda arriving: ([arriving.values()], (arriving.keys(), arriving.length_per_key())),
    lambda values, context: KeyedTensor(*context, next(iter(values))),
)
