"""Private names of torch.distributed.checkpoint: its pickled metadata, read without running it."""

import dataclasses
import importlib
import pickle
from collections.abc import Iterator
from typing import Any

import torch

DCP_METADATA_NAMES = frozenset({
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
})
"""Module and name of every class and function in the pickle of a checkpoint's metadata, except torch's dtypes: plain
dataclasses, an enum, and a lookup among torch's layouts. Source: torch/distributed/checkpoint/filesystem.py, finish."""

PythonUnpickler: Any = pickle._Unpickler
"""The unpickler written in Python: its opcodes can be overridden, those of the C one cannot. Source: Lib/pickle.py."""


def metadata_classes() -> set[type]:
    """Return the dataclasses among DCP_METADATA_NAMES; unpickling creates objects first, then sets their state."""
    found = (getattr(importlib.import_module(module), name) for module, name in DCP_METADATA_NAMES)
    return {each for each in found if isinstance(each, type) and dataclasses.is_dataclass(each)}


def is_torch_constant(module: str, name: str) -> bool:
    """Return whether `module.name` is one of torch's dtypes, such as torch.float32."""
    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)


def chunk_locations(metadata: Any) -> Iterator[tuple[str, str, int, int]]:
    """Yield the tensor's name, file, offset and length of each chunk in a checkpoint, as its metadata records them.

    Raises ValueError: a record is not a _StorageInfo with a relative path.
    Source: torch/distributed/checkpoint/filesystem.py.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    for index, info in (metadata.storage_data or {}).items():
        if not isinstance(info, _StorageInfo) or not isinstance(info.relative_path, str):
            raise ValueError(f"'{index}' has the storage record {info!r}")
        yield index.fqn, info.relative_path, info.offset, info.length
