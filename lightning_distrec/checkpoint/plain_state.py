"""Which chunks of a tensor each rank writes: its shards, or some rows of what all ranks hold
replicated."""

import io
import re
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from lightning_distrec._compat.tensors import is_first_replica, local_offsets
from lightning_distrec.checkpoint.hyperparameters import HYPERPARAMETERS, load_safely
from lightning_distrec.chunks import Chunk, ChunkedTensor
from lightning_distrec.errors import CheckpointError

SMALL_BYTES = 2**20
"""Replicated tensors below this size are written by one rank each."""


def as_chunked(value: Any) -> ChunkedTensor | None:
    """Return a DTensor, or a torchrec ShardedTensor, as ChunkedTensor, without copying; None for
    anything else."""
    if isinstance(value, ChunkedTensor):
        return value
    if isinstance(value, DTensor):
        return _chunked_dtensor(value)
    # slow to load; without it, nobody has made one
    types = sys.modules.get("torchrec.distributed.types")
    if types is None or not isinstance(value, types.ShardedTensor):
        return None
    shards = value.local_shards() if is_first_replica(value) else []  # the other ranks' are equal
    chunks = [Chunk(tuple(s.metadata.shard_offsets), s.tensor.detach()) for s in shards]
    return ChunkedTensor(
        tuple(value.size()), value.dtype, [chunk for chunk in chunks if chunk.tensor.numel()]
    )


def split_replicated(tensor: Tensor, rank: int, num_ranks: int, turn: int) -> ChunkedTensor:
    """Return the rows of a replicated tensor that this rank writes. turn: small ones are written by
    one rank each."""
    shape = tuple(tensor.shape)
    if not shape or shape[0] < num_ranks or tensor.nbytes < SMALL_BYTES:
        chunks = [Chunk((0,) * len(shape), tensor.detach())] if turn % num_ranks == rank else []
        return ChunkedTensor(shape, tensor.dtype, chunks)
    # One rank's end is the next one's first row, for any number of rows: nothing is missing or
    # written twice.
    first, end = shape[0] * rank // num_ranks, shape[0] * (rank + 1) // num_ranks
    return ChunkedTensor(
        shape, tensor.dtype, [Chunk((first, *[0] * (len(shape) - 1)), tensor.detach()[first:end])]
    )


def _chunked_dtensor(tensor: DTensor) -> ChunkedTensor:
    """Return this rank's rectangle; of what several ranks hold replicated, the first rank's."""
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    # Along a dimension of the mesh that replicates, the first rank writes; along the others each
    # has other rows.
    is_first = not any(
        coordinate and isinstance(placement, Replicate)
        for coordinate, placement in zip(coordinates, tensor.placements, strict=True)
    )
    local = tensor.to_local().detach()
    chunks = [Chunk(local_offsets(tensor), local)] if is_first and local.numel() else []
    return ChunkedTensor(tuple(tensor.shape), tensor.dtype, chunks)


INLINE_BYTES = 16 * 2**10
"""Tensors up to this size stay in the file with the plain values."""
STORED = "__stored__"
"""Key of a reference, a dict in place of a tensor: the tensor's name. Its other keys: "shape",
"dtype", and CHUNKED."""
CHUNKED = "parted"
"""Whether the tensor was sharded, and is read by the rectangle; the word in the files of format
1."""


def large_tensors(value: Any) -> list[tuple[str, tuple[int, ...], str]]:
    """Return path, shape and type of the large, unsharded tensors in nested dicts and lists."""
    tensors: list[tuple[str, tuple[int, ...], str]] = []

    def look(item: Any, path: str) -> Any:
        if _is_large(item):
            tensors.append((path, tuple(item.shape), str(item.dtype)))
        return map_nested(item, path, look)

    look(value, "")
    return tensors


def extract_tensors(
    value: Any, on_all: Container[str], rank: int, num_ranks: int, pickles: bool = False
) -> tuple[Any, dict[str, ChunkedTensor]]:
    """Return a copy of nested dicts and lists without their large tensors, and those by name: their
    path in it.

    on_all: paths of the large tensors that every rank holds; their rows are divided among the ranks
    for writing. What only some ranks hold stays in the copy. pickles: whether paths stay as they
    are, as they do in hyperparameters; else they become text.
    """
    tensors: dict[str, ChunkedTensor] = {}

    def taken(item: Any, path: str) -> Any:
        chunked = as_chunked(item)
        is_sharded = chunked is not None
        if chunked is None and path in on_all and _is_large(item):
            # Ranks find the same tensors in the same order, so that `turn` is the same on all of
            # them.
            chunked = split_replicated(item, rank, num_ranks, turn=len(tensors))
        if chunked is not None:
            tensors[path] = chunked
            return {
                STORED: path,
                "shape": tuple(chunked.shape),
                "dtype": chunked.dtype,
                CHUNKED: is_sharded,
            }
        if isinstance(item, nn.Parameter):
            return item.detach()
        keeps_paths = pickles or path.partition("/")[0] in HYPERPARAMETERS
        if isinstance(item, numpy.generic) or (isinstance(item, PurePath) and not keeps_paths):
            return with_plain_types(item)
        return map_nested(item, path, taken)

    return taken(value, ""), tensors


def insert_tensors(value: Any, stored: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Return a copy with tensors, or handles to them, for references: what `stored` returns for
    each."""
    if isinstance(value, Mapping) and STORED in value:
        return stored(value)
    # No inner function that calls itself: in its cycle, tensors would wait for the garbage
    # collector.
    return map_nested(value, "", lambda item, path: insert_tensors(item, stored))


def _is_large(item: Any) -> bool:
    # By exact type: subclasses of Tensor may keep their data elsewhere, and torch.save knows how.
    return (
        type(item) in (Tensor, nn.Parameter)
        and item.layout == torch.strided
        and item.nbytes > INLINE_BYTES
    )


def map_nested(item: Any, path: str, function: Callable[[Any, str], Any]) -> Any:
    """Return a copy of a dict, list or tuple with `function(value, path)` for each value; others as
    they are."""
    # By exact type: subclasses, such as defaultdict and named tuples, are built in other ways.
    if type(item) in (dict, OrderedDict):
        return type(item)(
            (key, function(value, f"{path}/{key}" if path else str(key)))
            for key, value in item.items()
        )
    if type(item) in (list, tuple):
        return type(item)(function(value, f"{path}/{i}") for i, value in enumerate(item))
    return item


def to_bytes(value: Any, pickles: bool = False) -> bytes:
    """Return `value` as torch.save writes it. Raises CheckpointError: it would not load again, and
    not `pickles`."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        if not pickles and not _is_read(buffer):
            # A checkpoint that cannot be read must fail while the run is alive.
            refuse_not_plain(without_hyperparameters(value))
            buffer.seek(0)
            load_safely(buffer, map_location="meta")
    except Exception:
        if not pickles:
            refuse_not_plain(without_hyperparameters(value))
        raise
    return buffer.getvalue()


def without_hyperparameters(value: Any) -> Any:
    """Return a checkpoint without those values in it that may be of any type."""
    if type(value) is not dict:
        return value
    return {key: child for key, child in value.items() if key not in HYPERPARAMETERS}


def with_plain_types(value: Any, path: str = "") -> Any:
    """Return a copy of nested dicts and lists with Python's numbers for numpy's, and text for
    paths."""
    if isinstance(value, numpy.generic):
        return value.item()
    return str(value) if isinstance(value, PurePath) else map_nested(value, path, with_plain_types)


def refuse_not_plain(value: Any, path: str = "checkpoint") -> None:
    """Raise CheckpointError where something in `value` would not be loaded again, naming it and its
    place."""
    culprit = find_not_plain(value, path)
    if culprit is not None:
        raise CheckpointError(
            f"{culprit} is no plain type (numbers, text, bytes, tensors, lists, tuples, dicts): "
            "loading it would run "
            "code. Return plain types from the state_dict or on_save_checkpoint that it comes "
            "from, or set "
            "checkpoint={'pickles': True} in the strategy, which saves it as Lightning does."
        )


def find_not_plain(value: Any, path: str = "checkpoint") -> str | None:
    """Return the place and type of the first value that torch.load(weights_only=True) would refuse,
    or None."""
    if isinstance(value, Mapping) and type(value) in (dict, OrderedDict):
        # Keys too: they may be of any type that has a hash.
        children = [(f"{path}[{key!r}]", child) for key, child in value.items()] + [
            (path, key) for key in value
        ]
    elif type(value) in (list, tuple, set):
        children = [(f"{path}[{i}]", child) for i, child in enumerate(value)]
    elif _loads(value):
        return None
    else:
        return f"{path}, a {type(value).__module__}.{type(value).__qualname__},"
    return next(filter(None, (find_not_plain(child, place) for place, child in children)), None)


def _loads(value: Any) -> bool:
    if value is None or type(value) in (bool, int, float, str, bytes, Tensor, nn.Parameter):
        return True
    # By trying, since torch's list of safe types depends on its version and on add_safe_globals.
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception:
        return False
    return _is_read(buffer)


def _is_read(buffer: io.BytesIO) -> bool:
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True, map_location="meta")  # there nothing is copied
    except Exception:
        return False
    return True


def read_plain(path: Path, pickles: bool = False) -> Any:
    """Read a file of torch.save, on the host. Raises CheckpointError: it has no plain types, and
    not `pickles`."""
    # torch maps files of its zip format only, and raises for older ones.
    return _load_plain(path, path, zipfile.is_zipfile(path), pickles)


def from_bytes(content: bytes, label: str) -> Any:
    """Return what `to_bytes` was given. label: what messages call it. Raises CheckpointError: it is
    something else."""
    return _load_plain(io.BytesIO(content), label, mmap=False)


def _load_plain(file: Any, label: Any, mmap: bool, pickles: bool = False) -> Any:
    try:
        if pickles:
            return torch.load(file, weights_only=False, map_location="cpu", mmap=mmap)
        return load_safely(file, map_location="cpu", mmap=mmap)
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {label}.") from None
    except Exception as error:
        if pickles:
            raise CheckpointError(
                f"{label} cannot be read ({type(error).__name__}: {error})."
            ) from error
        raise CheckpointError(
            f"{label} cannot be read: it holds something other than tensors and plain types, or "
            "is damaged "
            f"({_reason(error)}). Nothing in it was run."
        ) from None


def _reason(error: Exception) -> str:
    """Return the first line of torch's message, without its advice to read the file unsafely."""
    message = str(error)
    if asked_for := re.search(r"GLOBAL (\S+)", message):
        hint = (
            "it is read with checkpoint: {pickles: true}, or by export --pickles, if you trust it"
        )
        return f"it asks for {asked_for[1]}; {hint}"
    if not message.strip() or "weights_only" in message:
        return type(error).__name__
    return message.strip().splitlines()[0]


def numbered_names(state: Mapping[str, Any]) -> list[str]:
    """Return the names of an optimizer's parameters, in the order of the numbers that torch gives
    them."""
    return list(dict.fromkeys(name for group in state["param_groups"] for name in group["params"]))


def plain_optimizer_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state as torch keeps it: parameters have numbers instead of names, in
    groups and state."""
    numbers = {name: number for number, name in enumerate(numbered_names(state))}
    groups = [
        {**group, "params": [numbers[name] for name in group["params"]]}
        for group in state["param_groups"]
    ]
    states = {numbers[name]: values for name, values in state["state"].items()}
    return {**_extra_entries(state), "state": states, "param_groups": groups}


def named_optimizer_state(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return an optimizer's state by names again. names: of the parameters, in the order of their
    numbers."""
    groups = [
        {**group, "params": [names[number] for number in group["params"]]}
        for group in state["param_groups"]
    ]
    states = {names[number]: values for number, values in state["state"].items()}
    return {**_extra_entries(state), "state": states, "param_groups": groups}


def _extra_entries(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is saved next to an optimizer's state and its groups, in whichever form they
    are."""
    return {
        key: value
        for key, value in state.items()
        if key not in ("optimizer", "state", "param_groups")
    }
