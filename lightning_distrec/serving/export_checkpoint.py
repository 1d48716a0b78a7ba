"""Writes a checkpoint as one plain file of safetensors or torch, or a difference and its base as
one full checkpoint.

In one process, with a block of a tensor in memory at a time.
"""

import os
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_distrec.atomic_files import fsync, write_file
from lightning_distrec.checkpoint.atomic_folder import CHECKSUMS, UnfinishedFolder
from lightning_distrec.checkpoint.contents import (
    check_bytes,
    open_checkpoint,
    read_contents,
    verify,
)
from lightning_distrec.checkpoint.difference import CHANGED, INCREMENTAL, ROW_IDS, Difference
from lightning_distrec.checkpoint.lazy_tensors import as_lazy, collect_tensors
from lightning_distrec.checkpoint.plain_state import (
    CHUNKED,
    STORED,
    STORED_TYPES,
    map_nested,
    plain_optimizer_state,
    read_plain,
    reference,
    to_bytes,
)
from lightning_distrec.checkpoint.save import PLAN_FILE, STATE_FILE, rank_file
from lightning_distrec.checkpoint.tensor_files import (
    write_blocks,
    write_safetensors,
    write_tensors,
)
from lightning_distrec.chunks import Chunk, ChunkedTensor, LazyTensor, num_bytes
from lightning_distrec.errors import CheckpointError


def export_safetensors(
    path: Path, state: Mapping[str, Any], on_progress: Callable[[int], None]
) -> None:
    """Write a state_dict, whose tensors may be handles, as a safetensors file. Each name gets its
    own copy. Raises CheckpointError: the format cannot hold a value; OSError."""
    tensors = {name: _exportable(name, value) for name, value in state.items()}
    write_safetensors(path, tensors, on_progress)


def _exportable(name: str, value: Any) -> LazyTensor:
    lazy = as_lazy(value)
    kind = type(value).__name__ if lazy is None else f"tensor of {lazy.dtype}"
    is_dense = not isinstance(value, Tensor) or value.layout == torch.strided
    if lazy is None or lazy.dtype not in STORED_TYPES or not is_dense:
        problem = f"'{name}' is a {kind}, and safetensors files hold dense tensors"
        raise CheckpointError(f"{problem} of certain types only. Export to a .pt file instead.")
    return lazy


_ALIGNMENT = 64
"""A tensor's bytes begin at a multiple of it, as in torch's own files: they are used where they are
mapped."""
_HEADER_BYTES = 30 + 20
"""Of a record's header with sizes of 64 bits, without the name. Source: APPNOTE.TXT, 4.3.7 and
4.5.3."""
SUFFIXES = {
    ".pt": "a state_dict",
    ".safetensors": "a state_dict",
    ".ckpt": "a Lightning checkpoint",
}
"""Suffix of the target -> what is written."""


def export(
    source: Path,
    target: Path,
    *,
    overwrite: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    pickles: bool = False,
) -> None:
    """Write the checkpoint `source` as one plain file; tables pass through memory in blocks of 64
    MiB.

    source: a checkpoint's folder, a Lightning checkpoint, a state_dict of torch.save, or a
    safetensors file.
    target: its suffix decides the format, see SUFFIXES. The state of single ranks, generators and
    loaders, is left out.
    on_progress: called with the bytes written, and their total. pickles: whether it may hold any
    types, whose code is run; not for .ckpt. Raises CheckpointError: the file cannot be written, and
    nothing is left of it.
    """
    if target.suffix not in SUFFIXES:
        names = "*.pt or *.safetensors for a state_dict, *.ckpt for a Lightning checkpoint"
        raise CheckpointError(f"{target}: its suffix decides what to write. Name it {names}.")
    _must_be_free(target, overwrite)
    if pickles and target.suffix == ".ckpt":
        raise CheckpointError(
            f"{target}: --pickles reads weights alone. Name it *.safetensors or *.pt."
        )
    value = _read_content(source, target, pickles)
    total = sum(map(num_bytes, collect_tensors(value).values()))
    free = shutil.disk_usage(target.parent).free
    if total > free:
        raise CheckpointError(
            f"{target} needs {total:,} bytes, and its file system has {free:,} free."
        )
    written = 0

    def advance(count: int) -> None:
        nonlocal written
        written += count
        if on_progress is not None:
            on_progress(written, total)

    write = export_safetensors if target.suffix == ".safetensors" else write_torch_file
    try:
        with tempfile.TemporaryDirectory(prefix=".distrec-export-", dir=target.parent) as folder:
            unfinished = Path(folder, target.name)
            write(unfinished, value, advance)
            fsync(unfinished)
            # Again, because writing a large file takes long, and another process may have written
            # there.
            _must_be_free(target, overwrite)
            os.replace(unfinished, target)
        fsync(target.parent)
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be written: {error}. No file was left there."
        ) from error


def _must_be_free(target: Path, overwrite: bool) -> None:
    if target.is_dir():
        raise CheckpointError(
            f"{target} is a folder, and a file is to be written. Choose another name."
        )
    if os.path.lexists(target) and not overwrite:
        raise CheckpointError(
            f"{target} exists already. Choose another name, or replace it with --overwrite."
        )
    if not target.parent.is_dir():
        raise CheckpointError(
            f"{target}: the folder {target.parent} does not exist. Create it first."
        )


def _read_content(source: Path, target: Path, pickles: bool) -> dict[str, Any]:
    """Return what to write, with handles for tensors."""
    check_bytes(source, open_checkpoint(source))
    checkpoint = read_contents(source, pickles).checkpoint
    state = checkpoint.get("state_dict")
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{source} holds no state_dict, only {sorted(map(str, checkpoint))}; there is nothing "
            "to export."
        )
    if target.suffix != ".ckpt":
        return state
    if "pytorch-lightning_version" not in checkpoint:
        problem = (
            f"{source} is a bare state_dict. {target} would be a Lightning checkpoint, which needs "
            "more"
        )
        raise CheckpointError(f"{problem}. Export it to *.pt or *.safetensors.")
    states = checkpoint.get("optimizer_states")
    if states is None:
        return checkpoint
    # In our folders parameters have names; in torch's files they have numbers already.
    plain = [plain_optimizer_state(state) if "optimizer" in state else state for state in states]
    return {**checkpoint, "optimizer_states": plain}


def write_torch_file(path: Path, value: Any, on_progress: Callable[[int], None]) -> None:
    """Write nested dicts, lists and tuples, whose tensors may be handles, for
    torch.load(weights_only=True).

    torch.save writes a file with holes in place of the tensors' bytes, each in a storage of its
    own; its records are copied into another archive, with the bytes. path: in a folder for
    temporary files.
    Raises CheckpointError: a tensor is not dense, or not in a dict, list or tuple; OSError.
    """
    tensors = collect_tensors(value)
    # torch names the records in an archive by the file, but for its suffix.
    skeleton = path.with_suffix(".skeleton")
    _write_skeleton(skeleton, value, tensors)
    with zipfile.ZipFile(skeleton) as source, zipfile.ZipFile(path, "w") as target:
        # torch numbers storages in the order in which it comes to them, and each tensor here has
        # one of its own.
        records = {f"{path.stem}/data/{i}": lazy for i, lazy in enumerate(tensors.values())}
        sizes = {}
        for entry in source.infolist():
            if "/data/" in entry.filename:
                sizes[entry.filename] = entry.file_size
        # torch.save finds tensors inside of other objects as well; those would stay holes, full of
        # zeros.
        if sizes != {name: num_bytes(lazy) for name, lazy in records.items()}:
            raise CheckpointError(
                "a tensor is inside of something other than dicts, lists and tuples. Return those "
                "from its state_dict."
            )
        for name in source.namelist():
            with target.open(_entry(name, target.start_dir), "w", force_zip64=True) as file:
                if name in records:
                    write_blocks(file, records[name], on_progress)
                else:
                    file.write(source.read(name))


def _write_skeleton(path: Path, value: Any, tensors: Mapping[str, LazyTensor]) -> None:
    """Let torch.save write all but the tensors' bytes, of tensors in a sparse file, without memory
    or disk."""
    hole = path.with_suffix(".hole")

    def put(leaf: Any, place: str) -> Any:
        return _placeholder(hole, place, leaf, tensors[place]) if place in tensors else leaf

    try:
        with torch.serialization.skip_data():
            torch.save(map_nested(value, put), path)
    except RuntimeError as error:  # torch's, where the file cannot be written
        raise OSError(f"{path.name}: {error}") from error


def _placeholder(hole: Path, place: str, item: Any, lazy: LazyTensor) -> Tensor:
    """Return a tensor of the same shape and type whose memory is never touched, so that it takes
    none."""
    if isinstance(item, Tensor) and (item.layout != torch.strided or item.is_quantized):
        raise CheckpointError(
            f"'{place}' has the layout {item.layout}, or is quantized. Make it dense."
        )
    size = num_bytes(lazy)
    if not size:
        return torch.empty(lazy.shape, dtype=lazy.dtype)
    memory = torch.from_file(
        str(hole),
        shared=True,
        size=size,
        dtype=torch.uint8,
    )
    return memory.view(lazy.dtype).view(lazy.shape)


def _entry(name: str, begin: int) -> zipfile.ZipInfo:
    """Return a record whose header begins at `begin` of the file, and whose content is aligned, by
    an extra field."""
    entry = zipfile.ZipInfo(name)
    padding = -(begin + _HEADER_BYTES + len(name.encode()) + 4) % _ALIGNMENT
    entry.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    return entry


def merge(source: Path, target: Path) -> None:
    """Write what the difference `source` stands for into the folder `target`, or raise
    CheckpointError."""
    difference = open_checkpoint(source)
    if not isinstance(difference, Difference):
        raise CheckpointError(f"{source} is no difference: there is nothing to merge it with.")
    if target.exists():
        raise CheckpointError(f"{target} exists already. Choose another name.")
    # Written again, damaged rows would get checksums that match, and nobody could find them any
    # more.
    changed = verify(source)
    if changed:
        raise CheckpointError(f"{source} is damaged: {changed[0]} does not match its checksum.")
    handles = collect_tensors(read_contents(source).checkpoint)
    state, tensors = _full_state(read_plain(source / STATE_FILE), handles)
    marker = difference.marker
    copied = [PLAN_FILE, *(map(rank_file, range(marker["num_ranks"])))]
    content = dict(marker)
    # UnfinishedFolder writes these keys for the new folder; without INCREMENTAL it belongs to no
    # series.
    for key in ("format", "name", "files", INCREMENTAL):
        content.pop(key, None)
    unfinished = None
    try:
        unfinished = UnfinishedFolder(target.absolute())
        content[CHECKSUMS] = write_tensors(unfinished.path, tensors, rank=0)
        write_file(unfinished.path / STATE_FILE, to_bytes(state))
        for name in copied:
            if name in marker["files"]:
                shutil.copyfile(source / name, unfinished.path / name)
        unfinished.complete(content)
    except OSError as error:
        raise CheckpointError(
            f"{target} cannot be written: {error}. No folder was left there."
        ) from error
    finally:
        if unfinished is not None:
            unfinished.abandon()


def _full_state(
    raw: Any, handles: Mapping[str, LazyTensor]
) -> tuple[Any, dict[str, ChunkedTensor]]:
    """Return a difference's state as a full one's, and its tensors, read when written. handles: of
    both, by place."""
    tensors: dict[str, ChunkedTensor] = {}

    def put(leaf: Any, place: str) -> Any:
        if not isinstance(leaf, Mapping) or (STORED not in leaf and CHANGED not in leaf):
            return leaf
        # What lies along a table of the base is sharded there.
        is_sharded = leaf.get(CHUNKED, True)
        # The writer reads a handle, a block at a time.
        lazy: Any = handles[place]
        shape = tuple(lazy.shape)
        tensors[place] = ChunkedTensor(shape, lazy.dtype, [Chunk((0,) * len(shape), lazy)])
        return reference(place, shape, lazy.dtype, is_sharded)

    state = {key: value for key, value in raw.items() if key != ROW_IDS}
    return map_nested(state, put, leaf_keys=frozenset({STORED, CHANGED})), tensors
