"""What was written to a weight before it has rows, and how it is repeated for a block of them."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_distrec.errors import ShardingError
from lightning_distrec.sharding.weights.shard_operations import ELEMENTWISE
from lightning_distrec.sharding.weights.shard_weight import DRAWS

TRUNCATED = "trunc_normal_"
DRAWN = DRAWS | {TRUNCATED}
OVERWRITE = DRAWN | {"zero_", "fill_"}
Draw = Callable[..., Any]


class NeedsRows(Exception):
    """An operation that cannot be repeated block by block."""


@dataclass(frozen=True)
class Write:
    """One operation that wrote numbers into all of a weight, or into one of its rows."""

    name: str
    row: int | None
    """None: all rows."""
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def repeat(self, values: Tensor, start: int, generator: dict[str, Any]) -> None:
        """Write into `values`, the block of rows from `start`."""
        if self.row is not None:
            if not start <= self.row < start + len(values):
                return
            values = values[self.row - start]
        function: Any = (
            nn.init.trunc_normal_ if self.name == TRUNCATED else getattr(Tensor, self.name)
        )
        draws_by = generator if self.name in DRAWN else {}
        function(values, *self.arguments, **self.options, **draws_by)

    @property
    def overwrites(self) -> bool:
        """Whether nothing stays of what was there before."""
        return self.name in OVERWRITE and self.row is None


@dataclass
class Record:
    """What was written to a weight of shape (num_rows, dim) so far."""

    shape: tuple[int, int]
    draw: Draw
    """Called first on each block, unless all is overwritten."""
    description: str
    device: torch.device
    """Where the rows would be without this package."""
    writes: list[Write] = field(default_factory=list)
    rows: Tensor | None = None
    """All of them, once they are needed at once."""
    is_over: bool = False
    """Whether the weight is being sharded, so that no write could be repeated any more."""

    def fill(self, values: Tensor, start: int, **generator: Any) -> None:
        """Give the rows from `start` their values.

        values: (rows, dim), contiguous. generator: the one to draw by; torch's if none.
        """
        if not self.writes or not self.writes[0].overwrites:
            self.draw(values, **generator)
        with torch.no_grad():
            for write in self.writes:
                write.repeat(values, start, generator)

    def write_of(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Write:
        """Return an operation on the weight, or on one of its rows.

        Raises NeedsRows: it is not element by element, writes to another part of the weight, or
        takes other values than numbers.
        """
        name = operation.overloadpacket.__name__
        options = {key: value for key, value in kwargs.items() if value is not None}
        if name not in DRAWS | ELEMENTWISE or "generator" in options:
            raise NeedsRows
        row = self.row_of(args[0])
        arguments, options = apply_to_collection((args[1:], options), Tensor, _number)
        if name == "copy_":
            return Write("fill_", row, arguments[:1], {})
        return Write(name, row, arguments, options)

    def append(self, write: Write) -> None:
        """Record a write; what it overwrites need not be repeated."""
        if write.overwrites:
            self.writes.clear()
        self.writes.append(write)

    def row_of(self, view: Tensor) -> int | None:
        """Return which row a view of the weight is; None: all. Raises NeedsRows: another part."""
        width = self.shape[1]
        row, column = divmod(int(view.storage_offset()), width)
        if view.is_contiguous() and column == 0:
            if tuple(view.shape) == self.shape:
                return None
            if tuple(view.shape) == (width,):
                return row
        raise NeedsRows

    def resized(self, num_rows: int) -> "Record":
        """Return that of a weight of another number of rows.

        Raises ShardingError: one row was written to.
        """
        for write in self.writes:
            if write.row is not None:
                raise ShardingError(
                    f"{self.description} gets {num_rows} rows, and {write.name} wrote to its row "
                    f"{write.row} before. Build it with as many rows as `rows` says, or outside of "
                    "configure_model."
                )
        return replace(self, shape=(num_rows, self.shape[1]), writes=list(self.writes))

    def digest(self) -> str:
        """Return what differs between ranks that wrote other values."""
        return hashlib.blake2b(repr(self.writes).encode(), digest_size=8).hexdigest()

    def view(self, meta: Tensor) -> Tensor:
        """Return the view of `rows` that a view of the weight stands for."""
        assert self.rows is not None
        return self.rows.as_strided(meta.shape, meta.stride(), meta.storage_offset())


def _number(tensor: Tensor) -> Any:
    """Return the number that a tensor holds. Raises NeedsRows: it holds several, or none yet."""
    if tensor.is_meta or tensor.numel() != 1:
        raise NeedsRows
    return tensor.item()
