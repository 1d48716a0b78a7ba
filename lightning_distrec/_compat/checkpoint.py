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
"""Module and name of all that the pickle of a checkpoint's metadata needs, besides torch's types: plain dataclasses, an
enum, and a lookup among torch's layouts. Source: torch/distributed/checkpoint/filesystem.py, finish."""

PythonUnpickler: Any = pickle._Unpickler
"""The unpickler that is written in Python, whose steps can be overridden. Source: Lib/pickle.py."""


def metadata_classes() -> set[type]:
    """Return the dataclasses among DCP_METADATA_NAMES: their objects are built, and then given their state."""
    named = (getattr(importlib.import_module(module), name) for module, name in DCP_METADATA_NAMES)
    return {kind for kind in named if isinstance(kind, type) and dataclasses.is_dataclass(kind)}


def is_torch_constant(module: str, name: str) -> bool:
    """Whether `module.name` is one of torch's types of numbers, float32 for example."""
    return module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)


def chunk_locations(metadata: Any) -> Iterator[tuple[str, str, int, int]]:
    """Yield, of each chunk of a checkpoint's tensors: the tensor's name, the file it is said to lie in, offset, length.

    Raises ValueError: what says so is of another kind. Source: torch/distributed/checkpoint/filesystem.py.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    for index, info in (metadata.storage_data or {}).items():
        if not isinstance(info, _StorageInfo) or not isinstance(info.relative_path, str):
            raise ValueError(f"'{index}' is said to lie in {info!r}")
        yield index.fqn, info.relative_path, info.offset, info.length
