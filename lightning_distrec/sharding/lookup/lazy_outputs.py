"""What lookups do in backward: the order in which gradients are exchanged, and the refusal of
second gradients.

Lazy outputs are awaited on first access, and their autograd nodes are made then. A rank may access
rows earlier than others, for example to log their norm. Autograd runs the youngest node that is
ready, so that ranks would exchange gradients in different orders: of one lookup with those of
another, or with DDP's averages. Hence these nodes get sequence numbers that depend on the lookup
alone, and are above all others: gradients are sent as early as possible.

Gradients of two lookups in a step are refused where two updates inside of backward are not one with
their sum.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from lightning_distrec import spans
from lightning_distrec._compat.torch import (
    FIRST_ORDERED,
    in_backward,
    next_backward_number,
    order_backward,
    register_container,
)
from lightning_distrec._compat.torchrec_modules import JAGGED_TENSOR_FIELDS, KEYED_TENSOR_VALUES
from lightning_distrec.errors import OptimizerError

# More than one lookup makes. Above FIRST_ORDERED, 2**60, 63 bits leave numbers for 2**46 lookups.
_NODES_OF_A_LOOKUP = 2**16
_lookups = count()


class BackwardOrder:
    """The place of one lookup. All ranks make their lookups, and so these objects, in one order."""

    def __init__(self) -> None:
        self._next_number = FIRST_ORDERED + _NODES_OF_A_LOOKUP * next(_lookups)

    @contextmanager
    def number(self, outputs: Callable[[], list[Tensor]]) -> Iterator[None]:
        """Number the nodes made inside of the context that lead to `outputs`; later ones come first
        in backward."""
        # `outputs` is a function since it is called at the end of the context, when they exist.
        since = next_backward_number()
        yield
        self._next_number += order_backward(outputs(), since, self._next_number)


class SecondGradients:
    """The gradients of one collection's lookups. tables: full names of those that are updated once
    for each lookup."""

    def __init__(self, path: str, tables: list[str]) -> None:
        self._path = path
        self._tables = tables
        self._lookups: set[object] = set()
        self._num_made = 0
        self.on_second: Callable[[], None] | None = None
        """Called when a second lookup is made in a step, where it is not too late to sum the
        gradients of all."""

    def refuse(self, tables: Iterable[str]) -> None:
        """Refuse second gradients of these tables too, from now on."""
        self._tables = list(dict.fromkeys([*self._tables, *tables]))

    def allow(self, tables: Iterable[str]) -> None:
        """Take second gradients of these tables, also those of this step's lookups so far."""
        self._tables = [name for name in self._tables if name not in set(tables)]

    def hooks(self, update_watch: Any) -> list[Callable[[Tensor], None]]:
        """Return what to call with each gradient of the lookup that is made now."""
        if not torch.is_grad_enabled():
            return []
        # A checkpoint that recomputes its activations looks up again in backward, for the same
        # gradients.
        self._num_made += not in_backward()
        if self._num_made == 2 and self.on_second is not None:
            self.on_second()
        watched = None if update_watch is None else update_watch.note_lookup()
        return [hook for hook in (watched, self._hook()) if hook is not None]

    def _hook(self) -> Callable[[Tensor], None] | None:
        """Return what refuses a second gradient, None: nothing does."""
        if not self._tables:
            return None
        lookup = object()

        def gradient_arrived(_: Tensor) -> None:
            self._lookups.add(lookup)
            if len(self._lookups) > 1 and self._tables:
                raise OptimizerError(
                    f"gradients came to more than one lookup of '{self._path}' in a step, and "
                    f"table '{self._tables[0]}' is updated inside of backward once for each. Set "
                    "embedding_update='sparse' ('dense' for RowWiseAdagrad), or look all ids up at "
                    "once."
                )

        return gradient_arrived

    def forget(self) -> None:
        """Begin again: an optimizer has used the gradients that have come so far."""
        self._lookups.clear()
        self._num_made = 0


class LazyOutput:
    """The rows of one lookup.

    wait: waits for the exchange and returns the rows, in the unsharded order and types. It runs
    once, on first access, in the grad mode of the lookup: rows that are first accessed under
    no_grad may get a gradient later.
    """

    def __init__(self, wait: Callable[[], Any]) -> None:
        self._wait: Callable[[], Any] | None = wait
        self._with_gradient = torch.is_grad_enabled()
        self._rows: Any = None
        self.tensors: list[Tensor] = []
        """What came back from the exchange, once it is here: where its gradients are sent from."""

    @torch.compiler.disable
    def get(self) -> Any:
        """Return the rows; waits for them the first time."""
        if self._wait is not None:
            # The closure refers to the request and its ids: they are freed with the first access.
            wait = self._wait
            self._wait = None
            with torch.set_grad_enabled(self._with_gradient), spans.span(spans.WAIT_OUTPUT_DIST):
                self._rows = wait()
        return self._rows


class PooledEmbeddings:
    """Pooled embeddings by output, and all of them concatenated; each is made of the other on first
    access.

    torchrec groups columns by sharding type, so that concatenating costs a copy, in forward and in
    backward.
    order: of backward. columns: output -> (batch_size, width), in order. values: (batch_size,
    sum(widths)).
    """

    def __init__(
        self,
        names: list[str],
        widths: list[int],
        order: BackwardOrder,
        columns: dict[str, Tensor] | None = None,
        values: Tensor | None = None,
    ) -> None:
        self._names = names
        self._widths = widths
        self._order = order
        self._columns = columns
        self._values = values

    @property
    @torch.compiler.disable
    def values(self) -> Tensor:
        """All of them concatenated, in the unsharded order."""
        if self._values is None:
            # In grad mode, as LazyOutput: code that first looks at them under no_grad may use them
            # in its loss later.
            with torch.enable_grad(), self._order.number(lambda: [values]):
                values = torch.cat(list(self.columns.values()), dim=1)
            self._values = values
        return self._values

    @property
    @torch.compiler.disable
    def columns(self) -> dict[str, Tensor]:
        """Output -> its columns."""
        if self._columns is None:
            with torch.enable_grad(), self._order.number(lambda: list(columns)):
                columns = self.values.split(self._widths, dim=1)
            self._columns = dict(zip(self._names, columns, strict=True))
        return self._columns


class LazyKeyedTensor(KeyedTensor):
    """A KeyedTensor that becomes an ordinary one when its values are first accessed.

    output: of PooledEmbeddings. Access by key returns a table's columns without concatenating all
    of them.
    """

    def __init__(self, keys: list[str], length_per_key: list[int], output: LazyOutput) -> None:
        super().__init__(keys, length_per_key, None)  # type: ignore[arg-type]
        self.output = output

    def __getitem__(self, key: str) -> Tensor:
        """Return the embeddings of one key, (batch_size, width)."""
        column: Tensor = self.output.get().columns[key]
        return column

    def wait(self) -> KeyedTensor:
        """Wait for the rows; returns this, as the outputs of torchrec's sharded modules do."""
        self.output.get()
        return self

    def to_dict(self) -> dict[str, Tensor]:
        """Return the embeddings by key."""
        return dict(self.output.get().columns)


# KeyedTensor keeps its values in one attribute, which its methods read. A property of that name in
# the subclass sees the first read of any method. It then makes the object a plain KeyedTensor: the
# property is gone, so that later reads cost nothing, and what asks for the exact type
# (torch.compile, pytrees) finds it.
def _access_values(lazy: LazyKeyedTensor) -> Tensor:
    values: Tensor = lazy.output.get().values
    lazy.__class__ = KeyedTensor  # type: ignore[assignment]
    del lazy.output
    setattr(lazy, KEYED_TENSOR_VALUES, values)
    return values


def _ignore_values(lazy: LazyKeyedTensor, _: Any) -> None:
    """Let KeyedTensor's constructor set values that do not exist yet."""


setattr(LazyKeyedTensor, KEYED_TENSOR_VALUES, property(_access_values, _ignore_values))


class LazyJaggedTensor(JaggedTensor):
    """One output of an EmbeddingCollection, an ordinary JaggedTensor from its first access on."""

    def __init__(self, name: str, output: LazyOutput) -> None:
        # Not JaggedTensor's constructor, which reads the values.
        self.name = name
        self.output = output

    def materialize(self) -> None:
        """Become an ordinary JaggedTensor."""
        rows: JaggedTensor = self.output.get()[self.name]
        # As above: a plain object of the exact type, with all attributes that torchrec made, and
        # none of ours.
        self.__class__ = JaggedTensor  # type: ignore[assignment]
        self.__dict__.clear()
        self.__dict__.update(vars(rows))

    def wait(self) -> JaggedTensor:
        """Wait for the rows; returns this."""
        self.materialize()
        return self


def _access_field(name: str) -> property:
    def access(lazy: LazyJaggedTensor) -> Any:
        lazy.materialize()
        return vars(lazy)[name]

    return property(access)


for _name in JAGGED_TENSOR_FIELDS:
    setattr(LazyJaggedTensor, _name, _access_field(_name))

# torch's pytree goes by exact type: without this, code that flattens outputs would find a leaf, and
# no tensors.
register_container(
    LazyKeyedTensor,
    lambda lazy: ([lazy.values()], (lazy.keys(), lazy.length_per_key())),
    lambda values, context: KeyedTensor(*context, next(iter(values))),
)
