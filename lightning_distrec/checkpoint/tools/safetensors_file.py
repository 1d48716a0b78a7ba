"""Writes a safetensors file, byte for byte as the library does, with one block of a tensor in memory at a time.

The format: the header's length, 8 bytes, little-endian; the header, JSON, with each tensor's type, shape and place; the
tensors' bytes, little-endian, without gaps. Source: https://github.com/huggingface/safetensors#format
"""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from lightning_distrec.checkpoint.lazy_tensors import as_lazy
from lightning_distrec.checkpoint.tools.contents import bytes_of, num_bytes, read_blocks
from lightning_distrec.chunks import LazyTensor
from lightning_distrec.errors import CheckpointError

TYPES = {
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
"""Names of types, in the order in which the library writes them: large ones first, so that each tensor is aligned."""


def write_safetensors(path: Path, state: Mapping[str, Any], on_progress: Callable[[int], None]) -> None:
    """Write a state_dict, whose tensors may be handles. Names that share a tensor get a copy each.

    on_progress: called with the number of bytes written.
    Raises CheckpointError: the format cannot hold a value; OSError.
    """
    tensors = {name: _exportable(name, value) for name, value in state.items()}
    order = list(TYPES)
    names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))
    with open(path, "wb") as file:
        file.write(_header({name: tensors[name] for name in names}))
        for name in names:
            _write_bytes(file, tensors[name], on_progress)


def _write_bytes(file: IO[bytes], lazy: LazyTensor, on_progress: Callable[[int], None]) -> None:
    """Write a tensor. A function of its own, so that no block of it is held while the next tensor is read."""
    for block in read_blocks(lazy):
        on_progress(file.write(bytes_of(block)))


def _exportable(name: str, value: Any) -> LazyTensor:
    lazy = as_lazy(value)
    kind = type(value).__name__ if lazy is None else f"tensor of {lazy.dtype}"
    if lazy is None or lazy.dtype not in TYPES or (isinstance(value, torch.Tensor) and value.layout != torch.strided):
        raise CheckpointError(
            f"'{name}' is a {kind}, and safetensors files hold dense tensors of certain types only. Export to a .pt "
            "file instead."
        )
    return lazy


def _header(tensors: Mapping[str, LazyTensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, lazy in tensors.items():
        end = begin + num_bytes(lazy)
        entries[name] = {"dtype": TYPES[lazy.dtype], "shape": list(lazy.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
