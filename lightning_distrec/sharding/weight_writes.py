"""What was written to a weight before it has rows, and how it is repeated for a block of them."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_distrec._compat.tensors import version_of
from lightning_distrec.errors import ShardingError
from lightning_distrec.sharding.weights.shard_operations import ELEMENTWISE
from lightning_distrec.sharding.weights.shard_weight import DRAWS

OVERWRITE = DRAWS | {"zero_", "fill_", "copy_", "trunc_normal_"}
CLONED_ELEMENTS = 2**20
SAMPLED_ELEMENTS = 4096
Draw = Callable[..., Any]


class NeedsRows(Exception):
    """An operation that cannot be repeated block by block."""


@dataclass(frozen=True)
class Place:
    """Where a view of a weight begins, and how its dims run over rows and columns."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    row: int
    column: int
    row_dim: int | None
    """The dim that runs over rows; None: it is of one row."""
    step: int = 1
    """Rows from one to the next of `row_dim`."""

    @staticmethod
    def of_view(view: Tensor, width: int) -> "Place":
        """Return the place of a view of a weight of `width` columns. Raises NeedsRows: it is no
        rectangle."""
        row, column = divmod(int(view.storage_offset()), width)
        row_dim, last_column, num_column_dims = None, column, 0
        for dim, (size, stride) in enumerate(zip(view.shape, view.stride(), strict=True)):
            if size == 1:
                continue
            if stride % width == 0 and stride and row_dim is None:
                row_dim = dim
            else:
                num_column_dims += 1
                last_column += (size - 1) * stride
        if num_column_dims > 1 or last_column >= width:
            raise NeedsRows
        step = 1 if row_dim is None else view.stride(row_dim) // width
        return Place(tuple(view.shape), view.stride(), row, column, row_dim, step)

    def block(self, values: Tensor, start: int) -> tuple[Tensor, slice] | None:
        """Return the view's part of the rows from `start` that `values` holds, and which of its
        rows those are."""
        rows, width = values.shape
        first, last = 0, 1
        sizes = list(self.sizes)
        if self.row_dim is not None:
            first = max(0, -((self.row - start) // self.step))
            last = min(sizes[self.row_dim], (start + rows - 1 - self.row) // self.step + 1)
            sizes[self.row_dim] = last - first
        elif not start <= self.row < start + rows:
            return None
        if first >= last:
            return None
        offset = (self.row + first * self.step - start) * width + self.column
        return values.as_strided(sizes, self.strides, values.storage_offset() + offset), slice(
            first, last
        )

    def narrow(self, value: Any, rows: slice) -> Any:
        """Return the part of a tensor that meets the rows `rows` of the view."""
        if not isinstance(value, Tensor) or value.numel() == 1 or self.row_dim is None:
            return value
        return value.broadcast_to(self.sizes).narrow(
            self.row_dim, rows.start, rows.stop - rows.start
        )


@dataclass(frozen=True)
class Write:
    """One operation that wrote into a weight."""

    name: str
    place: Place
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    versions: list[tuple[Tensor, int]]
    """The tensors among the arguments that were not cloned, and their versions then."""

    def repeat(self, values: Tensor, start: int, generator: dict[str, Any]) -> None:
        """Write into the block of rows from `start`. Raises ShardingError: an argument was changed
        since."""
        for tensor, version in self.versions:
            if version_of(tensor) != version:
                raise ShardingError(
                    f"a tensor of shape {tuple(tensor.shape)} was changed after {self.name} had "
                    "read it for a table "
                    "whose rows are made later. Give it a copy: clone()."
                )
        part = self.place.block(values, start)
        if part is None:
            return
        view, rows = part
        if self.name == "index_put_":
            _put(view, rows, *self.arguments)
            return
        arguments, options = [
            apply_to_collection(
                written, Tensor, lambda tensor: self.place.narrow(tensor, rows).to(values.device)
            )
            for written in (self.arguments, self.options)
        ]
        getattr(nn.init if self.name == "trunc_normal_" else Tensor, self.name)(
            view,
            *arguments,
            **options,
            **(generator if self.name in DRAWS | {"trunc_normal_"} else {}),
        )


def _put(
    view: Tensor, rows: slice, indices: list[Tensor | None], value: Tensor, accumulate: bool = False
) -> None:
    index = indices[0]
    assert index is not None
    if index.dtype == torch.bool:
        view[index[rows].to(view.device)] = value.to(view.device)
        return
    inside = (index >= rows.start) & (index < rows.stop)
    value = value if value.numel() == 1 else value.broadcast_to(*index.shape, view.shape[1])[inside]
    view.index_put_(
        (index[inside].to(view.device) - rows.start,), value.to(view.device), accumulate
    )


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
        """Give the rows from `start` their values. values: (rows, dim), contiguous; generator:
        torch's if none."""
        if not self.writes or not self._overwrites(self.writes[0]):
            self.draw(values, **generator)
        with torch.no_grad():
            for write in self.writes:
                write.repeat(values, start, generator)

    def write_of(self, operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Write:
        """Return an operation on a view of the weight. Raises NeedsRows: it is not element by
        element."""
        view, arguments, options = (
            args[0],
            args[1:],
            {key: v for key, v in kwargs.items() if v is not None},
        )
        name = operation.overloadpacket.__name__
        place = Place.of_view(view, self.shape[1])
        if name == "index_put_":
            arguments = self._checked_put(place, *arguments)
        elif name not in DRAWS | ELEMENTWISE or "generator" in options:
            raise NeedsRows
        versions: list[tuple[Tensor, int]] = []

        def copied(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                raise NeedsRows
            if tensor.numel() <= CLONED_ELEMENTS or tensor.is_inference():
                return tensor.detach().clone()
            versions.append((tensor, version_of(tensor)))
            return tensor.detach()

        arguments, options = apply_to_collection((arguments, options), Tensor, copied)
        return Write(name, place, arguments, options, versions)

    def append(self, write: Write) -> None:
        """Record a write; what it overwrites need not be repeated."""
        if self._overwrites(write):
            self.writes.clear()
        self.writes.append(write)

    def _checked_put(
        self, place: Place, indices: Any, value: Tensor, accumulate: bool = False
    ) -> tuple[Any, ...]:
        index = indices[0]
        is_mask = index is not None and index.dtype == torch.bool
        if (
            place.sizes != self.shape
            or len(indices) > 1
            or index is None
            or (is_mask and value.numel() > 1)
        ):
            raise NeedsRows
        if not is_mask:
            index = torch.where(index < 0, index + self.shape[0], index)
        return [index], value, accumulate

    def _overwrites(self, write: Write) -> bool:
        return write.name in OVERWRITE and write.place.sizes == self.shape

    def resized(self, num_rows: int) -> "Record":
        """Return that of a weight of another number of rows. Raises ShardingError: a write is to
        some rows only."""
        record = replace(self, shape=(num_rows, self.shape[1]), writes=[])
        for write in self.writes:
            if write.place.sizes != self.shape or any(
                isinstance(v, Tensor) and v.numel() > 1 for v in write.arguments
            ):
                raise ShardingError(
                    f"{self.description} gets {num_rows} rows, and {write.name} wrote to its rows "
                    "one by one before. "
                    "Build it with as many rows as `rows` says, or outside of configure_model."
                )
            place = Place((num_rows, self.shape[1]), write.place.strides, 0, 0, 0)
            record.writes.append(
                Write(write.name, place, write.arguments, write.options, write.versions)
            )
        return record

    def digest(self) -> str:
        """Return what differs between ranks that wrote other values; of large tensors a sample is
        taken."""

        def sample(tensor: Tensor) -> Any:
            every = max(1, tensor.numel() // SAMPLED_ELEMENTS)
            return tuple(tensor.shape), tensor.detach().reshape(-1)[::every].tolist()

        writes = [
            (w.name, w.place, apply_to_collection((w.arguments, w.options), Tensor, sample))
            for w in self.writes
        ]
        return hashlib.blake2b(repr(writes).encode(), digest_size=8).hexdigest()

    def view(self, meta: Tensor) -> Tensor:
        """Return the view of `rows` that a view of the weight stands for."""
        assert self.rows is not None
        return self.rows.as_strided(meta.shape, meta.stride(), meta.storage_offset())
