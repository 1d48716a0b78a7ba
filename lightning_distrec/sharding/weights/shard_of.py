"""Where a guarded tensor's values lie in their table, and the error for what needs the full table."""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from lightning_distrec._compat.torch import without_torch_function
from lightning_distrec.errors import ShardedWeightError

P = ParamSpec("P")
R = TypeVar("R")

without_guard = without_torch_function
"""A context in which shards are plain tensors; each operation on them then costs a microsecond less."""

WAYS = {
    "weight": (
        "To use rows, look them up. trainer.strategy.full_parameter('{table}'), called on every rank, returns the full "
        "weight as it is now; lightning_distrec.sharded_l2(table) is its sum of squares, and the callback "
        "NormalizeRows scales rows. A table whose weight is used in the step otherwise, for tied output weights for "
        "example, is gathered there with tables={{'{table}': {{'gathered_weight': True}}}}, or stays on every rank "
        "with 'replicated': True. To export the module, call trainer.strategy.unshard() on every rank after the run."
    ),
    "gradient": "trainer.strategy.gradient_norms(), called on every rank, returns the norms of all gradients.",
}


writes: Counter[str] = Counter()
"""Table -> writes of user code into its weight, in any module; torch does not count those that go through `.data`."""


@dataclass(frozen=True)
class ShardOf:
    """Where a shard is in its table."""

    table: str
    """The table's full name."""
    shape: tuple[int, int]
    """The table's rows and columns."""
    row: int
    column: int
    num_rows: int
    num_columns: int
    weights: Sequence[Any] = field(repr=False)
    """All shards of the table on this rank, this one among them; the first stands for the table."""
    alone: bool
    """Whether no rank has more than one shard of the table."""
    loss_weight: Callable[[], float] = field(repr=False)
    """Returns what this rank's loss is multiplied by in the current backward, for its share of the examples."""
    gathering: Any = field(default=None, repr=False)
    """Gathers the full weight where it is read; None: reading it raises."""
    group: Any = field(default=None, repr=False)
    """Process group of the ranks that have the table's shards; None: the default one."""
    what: str = "weight"
    """Whose values they are: the weight's or its gradient's."""

    @property
    def stands_for_table(self) -> bool:
        """Whether this is the first shard of the table on this rank."""
        return self.alone or (self.row, self.column) == (self.weights[0].of.row, self.weights[0].of.column)

    def meta(self) -> Tensor:
        """Return a tensor without values of the shape that user code sees: one shard has it, others are empty."""
        rows, columns = self.shape
        return torch.empty(rows if self.stands_for_table else 0, columns, device="meta")

    def of_full(self, full: Tensor) -> Tensor:
        """Return the shard's rectangle of a full table, as a view."""
        return full[self.row : self.row + self.num_rows, self.column : self.column + self.num_columns]

    def note_write(self) -> None:
        """Note that user code writes into these values."""
        if self.what == "weight":
            writes[self.table] += 1

    def refusal(self, operation: str) -> ShardedWeightError:
        """Return the error for an operation that needs the full table."""
        return refusal(self.table, self.what, operation)


def without_guards(call: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function of ours that looks at many shards, which costs a microsecond less for each."""

    @functools.wraps(call)
    def unguarded(*args: P.args, **kwargs: P.kwargs) -> R:
        with without_guard():
            return call(*args, **kwargs)

    return unguarded


def refusal(table: str, what: str, operation: str) -> ShardedWeightError:
    """Return the error for what needs a full table. what: "weight" or "gradient"."""
    return ShardedWeightError(
        f"the {what} of the sharded table '{table}' was read ({operation}), but it is on several ranks. "
        f"{WAYS[what].format(table=table)}"
    )
