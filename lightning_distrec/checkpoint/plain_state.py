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
from lightning_distrec.checkpoint.hyperparameters import (
    HYPERPARAMETERS,
    load_safely,
    without_hyperparameters,
)
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
    # Slow to load; without it, nobody has made one.
    types = sys.modules.get("torchrec.distributed.types")
    if types is None or not isinstance(value, types.ShardedTensor):
        return None
    chunks = []
    # The other replicas' are equal.
    for shard in value.local_shards() if is_first_replica(value) else []:
        if shard.tensor.numel():
            chunks.append(Chunk(tuple(shard.metadata.shard_offsets), shard.tensor.detach()))
    return ChunkedTensor(tuple(value.size()), value.dtype, chunks)


def split_replicated(tensor: Tensor, rank: int, num_ranks: int, turn: int) -> ChunkedTensor:
    """Return the rows of a replicated tensor that this rank writes. turn: small ones are written by
    one rank each."""
    shape = tuple(tensor.shape)
    other_offsets = (0,) * (len(shape) - 1)
    if not shape or shape[0] < num_ranks or tensor.nbytes < SMALL_BYTES:
        chunks = []
        if turn % num_ranks == rank:
            chunks.append(Chunk((0,) * len(shape), tensor.detach()))
        return ChunkedTensor(shape, tensor.dtype, chunks)
    # One rank's end is the next one's first row, for any number of rows: nothing is missing or
    # written twice.
    first = shape[0] * rank // num_ranks
    end = shape[0] * (rank + 1) // num_ranks
    rows = Chunk((first, *other_offsets), tensor.detach()[first:end])
    return ChunkedTensor(shape, tensor.dtype, [rows])


def _chunked_dtensor(tensor: DTensor) -> ChunkedTensor:
    """Return this rank's rectangle; of what several ranks hold replicated, the first rank's."""
    coordinates = tensor.device_mesh.get_coordinate()
    assert coordinates is not None
    chunks = []
    local = tensor.to_local().detach()
    # Along a dimension of the mesh that replicates, the first rank writes; along the others each
    # has other rows.
    pairs = zip(coordinates, tensor.placements, strict=True)
    is_copy = any(place and isinstance(placement, Replicate) for place, placement in pairs)
    if local.numel() and not is_copy:
        chunks.append(Chunk(local_offsets(tensor), local))
    return ChunkedTensor(tuple(tensor.shape), tensor.dtype, chunks)


STORED_TYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Types that safetensors files hold -> their names there, in the order in which the library writes
them: large ones first, so that each tensor is aligned. Tensors of others stay with plain values."""
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
    large = []
    for path, leaf in leaves_of(value).items():
        if _is_large(leaf):
            large.append((path, tuple(leaf.shape), str(leaf.dtype)))
    return large


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

    def taken(leaf: Any, path: str) -> Any:
        chunked = as_chunked(leaf)
        is_sharded = chunked is not None
        if chunked is None and path in on_all and _is_large(leaf):
            # Ranks find the same tensors in the same order, so that `turn` is the same on all of
            # them.
            chunked = split_replicated(leaf, rank, num_ranks, turn=len(tensors))
        if chunked is not None:
            tensors[path] = chunked
            return reference(path, chunked.shape, chunked.dtype, is_sharded)
        if isinstance(leaf, nn.Parameter):
            return leaf.detach()
        keeps_paths = pickles or path.partition("/")[0] in HYPERPARAMETERS
        if isinstance(leaf, PurePath) and keeps_paths:
            return leaf
        return _plain(leaf, path)

    return map_nested(value, taken), tensors


def reference(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, is_sharded: bool
) -> dict[str, Any]:
    """Return what stands in a state for a tensor that is stored elsewhere."""
    return {STORED: name, "shape": tuple(shape), "dtype": dtype, CHUNKED: is_sharded}


def insert_tensors(value: Any, stored: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Return a copy with tensors, or handles to them, for references: what `stored` returns for
    each."""

    def put(leaf: Any, path: str) -> Any:
        return stored(leaf) if isinstance(leaf, Mapping) and STORED in leaf else leaf

    return map_nested(value, put, leaf_keys=frozenset({STORED}))


def _is_large(leaf: Any) -> bool:
    # By exact type: subclasses of Tensor may keep their data elsewhere, and torch.save knows how.
    if type(leaf) not in (Tensor, nn.Parameter) or leaf.layout != torch.strided:
        return False
    return leaf.nbytes > INLINE_BYTES and leaf.dtype in STORED_TYPES


NONE: frozenset[str] = frozenset()
PLAIN_TYPES = frozenset({type(None), bool, int, float, str, bytes})


def map_nested(
    value: Any,
    function: Callable[[Any, str], Any],
    path: str = "",
    leaf_keys: frozenset[str] = NONE,
) -> Any:
    """Return a copy of nested dicts, lists and tuples with `function(leaf, path)` for each value in
    them, but for numbers and text, which stay.

    leaf_keys: a dict with one of these keys is a value, too.
    """
    kind = type(value)
    # By exact type: subclasses, such as defaultdict and named tuples, are built in other ways.
    is_dict = kind in (dict, OrderedDict)
    if is_dict and leaf_keys.isdisjoint(value):
        items = value.items()
    elif kind in (list, tuple):
        items = enumerate(value)
    else:
        return value if kind in PLAIN_TYPES else function(value, path)
    prefix = f"{path}/" if path else ""
    children = {}
    for key, child in items:
        # Most values are plain: they take no call.
        if type(child) not in PLAIN_TYPES:
            child = map_nested(child, function, f"{prefix}{key}", leaf_keys)
        children[key] = child
    return kind(children if is_dict else children.values())


def leaves_of(value: Any) -> dict[str, Any]:
    """Return the values in nested dicts, lists and tuples by their path, in order, but for numbers
    and text."""
    leaves: dict[str, Any] = {}

    def note(leaf: Any, path: str) -> None:
        leaves[path] = leaf

    map_nested(value, note)
    return leaves


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


def with_plain_types(value: Any) -> Any:
    """Return a copy of nested dicts and lists with Python's numbers for numpy's, and text for
    paths."""
    return map_nested(value, _plain)


def _plain(leaf: Any, path: str) -> Any:
    if isinstance(leaf, numpy.generic):
        return leaf.item()
    return str(leaf) if isinstance(leaf, PurePath) else leaf


def refuse_not_plain(value: Any, path: str = "checkpoint") -> None:
    """Raise CheckpointError where something in `value` would not be loaded again, naming it and its
    place."""
    culprit = find_not_plain(value, path)
    if culprit is not None:
        raise CheckpointError(
            f"{culprit} is no plain type (numbers, text, bytes, tensors, lists, tuples, dicts): "
            "loading it would run code. Return plain types from the state_dict or "
            "on_save_checkpoint that it comes from, or set checkpoint={'pickles': True} in the "
            "strategy, which saves it as Lightning does."
        )


def find_not_plain(value: Any, path: str = "checkpoint") -> str | None:
    """Return the place and type of the first value that torch.load(weights_only=True) would refuse,
    or None."""
    children: list[tuple[str, Any]]
    if type(value) in (dict, OrderedDict):
        children = [(f"{path}[{key!r}]", child) for key, child in value.items()]
        # Keys too: they may be of any type that has a hash.
        children += [(path, key) for key in value]
    elif type(value) in (list, tuple, set):
        children = [(f"{path}[{i}]", child) for i, child in enumerate(value)]
    elif _loads(value):
        return None
    else:
        return f"{path}, a {type(value).__module__}.{type(value).__qualname__},"
    for place, child in children:
        culprit = find_not_plain(child, place)
        if culprit is not None:
            return culprit
    return None


def _loads(value: Any) -> bool:
    if type(value) in PLAIN_TYPES or type(value) in (Tensor, nn.Parameter):
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
            f"{label} cannot be read: it holds something other than tensors and plain types, or is "
            f"damaged ({_reason(error)}). Nothing in it was run."
        ) from None


def _reason(error: Exception) -> str:
    """Return the first line of torch's message, without its advice to read the file unsafely."""
    message = str(error)
    asked_for = re.search(r"GLOBAL (\S+)", message)
    if asked_for is not None:
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
    names: dict[str, None] = {}
    for group in state["param_groups"]:
        names |= dict.fromkeys(group["params"])
    return list(names)


def plain_optimizer_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state as torch keeps it: parameters have numbers instead of names, in
    groups and state."""
    numbers = {name: number for number, name in enumerate(numbered_names(state))}
    return _renamed_state(state, numbers)


def named_optimizer_state(state: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """Return an optimizer's state by names again. names: of the parameters, in the order of their
    numbers."""
    return _renamed_state(state, dict(enumerate(names)))


def _renamed_state(state: Mapping[str, Any], new: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a state with its groups' parameters by other names, and what is saved next to it but
    for the optimizer's class."""
    states = {new[name]: values for name, values in state["state"].items()}
    groups = []
    for group in state["param_groups"]:
        parameters = [new[name] for name in group["params"]]
        groups.append({**group, "params": parameters})
    renamed = {**state, "state": states, "param_groups": groups}
    renamed.pop("optimizer", None)
    return renamed
