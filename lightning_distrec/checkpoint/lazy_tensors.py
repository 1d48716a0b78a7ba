"""Handles of a checkpoint's tensors: what a rank needs of a tensor is read from the file, by the
rectangle."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from typing_extensions import override

from lightning_distrec._compat.tensors import local_offsets
from lightning_distrec._compat.torch import without_torch_function
from lightning_distrec.checkpoint.plain_state import leaves_of
from lightning_distrec.chunks import Chunk, LazyTensor, copy_into, row_ranges


class MappedTensor(LazyTensor):
    """A tensor of a plain file, mapped into memory: only what is copied from it is read."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype

    @override
    def read_into(self, chunks: Sequence[Chunk]) -> None:
        copy_into(chunks, self.tensor)

    @override
    def read(self) -> Tensor:
        return self.tensor


class GrownTensor(LazyTensor):
    """A saved tensor along a table whose rows are more now, or of other values than when it was
    saved."""

    def __init__(self, saved: LazyTensor, num_rows: int, factor: int, new_rows: Tensor) -> None:
        """factor: rows that each saved row but row 0 becomes. new_rows: (num,), those that nothing
        is read into."""
        self._saved = saved
        self._factor = factor
        self._new_rows = new_rows
        self.shape = (num_rows, *saved.shape[1:])
        self.dtype = saved.dtype

    @override
    def read(self) -> Tensor:
        raise NotImplementedError("it has no values of new rows; read it into a tensor that has")

    @override
    @torch.no_grad()
    def read_into(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            rows = self._new_rows - chunk.offsets[0]
            is_here = (rows >= 0) & (rows < len(chunk.tensor))
            rows = rows[is_here].to(chunk.tensor.device)
            kept = chunk.tensor[rows]
            self._saved.read_into(self._parts(chunk))
            chunk.tensor[rows] = kept

    def _parts(self, chunk: Chunk) -> list[Chunk]:
        """Return the rows of a chunk as strides, each of a run of saved rows."""
        (top, *columns) = chunk.offsets
        parts = [Chunk((0, *columns), chunk.tensor[:1])] if top == 0 else []
        # Row 0 is of missing values, and stays one row: the others begin at 1.
        first = max(top, 1)
        stop = min(first + self._factor, top + len(chunk.tensor))
        for row in range(first, stop):
            saved_row = 1 + (row - 1) // self._factor
            rows = chunk.tensor[row - top :: self._factor]
            parts.append(Chunk((saved_row, *columns), rows))
        return parts


DESCRIBES = frozenset({
    *(
        "shape",
        "dtype",
        "ndim",
        "layout",
        "requires_grad",
        "is_leaf",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "grad",
    ),
    *(
        "nbytes",
        "itemsize",
        "is_cuda",
        "size",
        "dim",
        "numel",
        "nelement",
        "stride",
        "element_size",
        "is_contiguous",
    ),
    *("is_floating_point", "is_complex", "__len__", "__hash__"),
})
"""Attributes and methods that read no values."""


class UnreadTensor(Tensor):
    """A tensor in a file: what copies all of it reads it into the copy; anything else reads it in
    full, once."""

    lazy: LazyTensor
    full: Tensor | None

    @staticmethod
    def of_lazy(lazy: LazyTensor) -> "UnreadTensor":
        """Return what stands for a handle."""
        unread: Any = torch.empty(lazy.shape, dtype=lazy.dtype, device="meta").as_subclass(
            UnreadTensor
        )
        unread.lazy = lazy
        unread.full = None
        return unread  # type: ignore[no-any-return]

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        with without_torch_function():
            if name in DESCRIBES:
                return func(*args, **(kwargs or {}))
            if name in ("device", "is_meta", "is_cpu"):
                return {"device": torch.device("cpu"), "is_meta": False, "is_cpu": True}[name]
            if (
                name == "copy_"
                and len(args) == 2
                and not kwargs
                and isinstance(args[1], cls)
                and _is_read_into(*args)
            ):
                return args[0]
            args, kwargs = apply_to_collection((args, kwargs or {}), cls, _full)
            return func(*args, **kwargs)


def _is_read_into(target: Tensor, unread: UnreadTensor) -> bool:
    is_same = (
        target.shape == unread.shape
        and target.dtype == unread.dtype
        and target.device.type == "cpu"
    )
    if unread.full is not None or not is_same or type(target) not in (Tensor, nn.Parameter):
        return False
    unread.lazy.read_into([Chunk((0,) * target.dim(), target.detach())])
    return True


def _full(unread: UnreadTensor) -> Tensor:
    if unread.full is None:
        unread.full = unread.lazy.read()
    return unread.full


def as_lazy(value: Any) -> LazyTensor | None:
    """Return what can be read of `value` by the rectangle: a handle, or a tensor in memory; None
    for others."""
    if isinstance(value, Tensor):
        return MappedTensor(value)
    return value if isinstance(value, LazyTensor) else None


def collect_tensors(value: Any) -> dict[str, LazyTensor]:
    """Return the tensors in nested dicts, lists and tuples by their path, in order."""
    tensors: dict[str, LazyTensor] = {}
    for path, leaf in leaves_of(value).items():
        lazy = as_lazy(leaf)
        if lazy is not None:
            tensors[path] = lazy
    return tensors


def materialized(value: Any) -> Any:
    """Return the tensor of a handle, `value` itself for anything else."""
    return value.read() if isinstance(value, LazyTensor) else value


def materialized_as(value: Any, parameter: Any, start: Tensor | float = 0.0) -> Any:
    """Return the tensor of a handle: this rank's shard where `parameter` is a DTensor of its shape,
    else replicated.

    start: the values of rows that a GrownTensor has not, as a tensor of all rows or one number.
    """
    # A DTensor is an instance of Tensor too, but has its placements already.
    lazy = None if isinstance(value, DTensor) else as_lazy(value)
    is_dtensor = isinstance(parameter, DTensor)
    if lazy is None or not lazy.shape or not (is_dtensor or isinstance(lazy, GrownTensor)):
        return materialized(value)
    if not is_dtensor:
        full = torch.empty(lazy.shape, dtype=lazy.dtype, device=parameter.device)
        full.copy_(torch.as_tensor(start).detach())
        lazy.read_into([Chunk((0,) * full.dim(), full)])
        return full
    if tuple(lazy.shape) != tuple(parameter.shape):
        mesh = parameter.device_mesh
        full = lazy.read().to(parameter.to_local().device)
        return DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim)
    values: Any = start if isinstance(start, Tensor) else torch.full_like(parameter, start)
    local = values.detach().to_local().to(lazy.dtype, copy=True)
    if local.numel():
        lazy.read_into([Chunk(local_offsets(parameter), local)])
    # from_local infers the shape from equal shards, and the last rank's may be smaller: hence shape
    # and stride.
    mesh = parameter.device_mesh
    placements = parameter.placements
    shape = parameter.shape
    stride = parameter.stride()
    return DTensor.from_local(local, mesh, placements, shape=shape, stride=stride)


def read_blocks(lazy: LazyTensor) -> Iterator[Tensor]:
    """Yield a tensor's rows in order, on the host, BLOCK_BYTES or a row at a time; a block may
    overwrite the last one."""
    shape = tuple(lazy.shape)
    if not shape:
        yield lazy.read().cpu()
        return
    source = lazy.tensor if isinstance(lazy, MappedTensor) else None
    memory: Tensor | None = None
    for first, count in row_ranges(shape, lazy.dtype.itemsize):
        if source is not None and source.device.type == "cpu":
            yield source[first : first + count]
            continue
        # No later block has more rows than the first one, so that its memory serves all.
        if memory is None:
            is_on_gpu = source is not None and source.is_cuda
            memory = torch.empty((count, *shape[1:]), dtype=lazy.dtype, pin_memory=is_on_gpu)
        block = memory[:count]
        lazy.read_into([Chunk((first, *[0] * (len(shape) - 1)), block)])
        yield block
