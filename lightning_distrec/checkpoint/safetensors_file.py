"""Writes a safetensors file from tensors that are never in memory as a whole, byte for byte as the library does.

The format: the header's length, 8 bytes, little-endian; the header, JSON, with each tensor's type, shape and place; the
tensors' bytes, little-endian, without gaps. Source: https://github.com/huggingface/safetensors#format
"""

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from lightning_distrec.checkpoint.contents import bytes_of, num_bytes, pieces
from lightning_distrec.checkpoint.load import as_whole
from lightning_distrec.chunks import Whole
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
"""Names of types, in the order in which the library puts them: large ones first, so that each tensor is aligned."""


def write_safetensors(path: Path, state: Mapping[str, Any], told: Callable[[int], None]) -> None:
    """Write a state_dict, whose tensors may be handles. Names that share a tensor get a copy each.

    told: called with the number of bytes that were written.
    Raises CheckpointError: the format has no place for a value; OSError.
    """
    wholes = {name: _exportable(name, value) for name, value in state.items()}
    order = list(TYPES)
    names = sorted(wholes, key=lambda name: (order.index(wholes[name].dtype), name))
    with open(path, "wb") as file:
        file.write(_header({name: wholes[name] for name in names}))
        for name in names:
            _write_bytes(file, wholes[name], told)


def _write_bytes(file: IO[bytes], whole: Whole, told: Callable[[int], None]) -> None:
    """Write a tensor. A function of its own, so that no piece of it is held while the next tensor is read."""
    for piece in pieces(whole):
        told(file.write(bytes_of(piece)))


def _exportable(name: str, value: Any) -> Whole:
    whole = as_whole(value)
    kind = type(value).__name__ if whole is None else f"tensor of {whole.dtype}"
    if whole is None or whole.dtype not in TYPES or (isinstance(value, torch.Tensor) and value.layout != torch.strided):
        raise CheckpointError(
            f"'{name}' is a {kind}, and safetensors files hold dense tensors of certain types only. Export to a .pt "
            "file instead."
        )
    return whole


def _header(wholes: Mapping[str, Whole]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, whole in wholes.items():
        end = begin + num_bytes(whole)
        entries[name] = {"dtype": TYPES[whole.dtype], "shape": list(whole.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
