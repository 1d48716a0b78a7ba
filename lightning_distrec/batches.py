"""What is in a batch, whatever containers it is made of, and what each rank reports of its
batches."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_distrec._compat.torch import default_store

SAMPLED_ELEMENTS = 4096
"""Of each tensor, for its fingerprint."""
_numbers = count()
"""Ranks make their reports in one order, so that these are alike on all."""


def named_leaves(
    value: Any, name: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield what is in containers and dataclasses, each once, with the name that it has in the
    innermost of them."""
    seen = set() if seen is None else seen
    # This also ends the recursion where a list or a dict contains itself.
    if id(value) in seen:
        return
    if not isinstance(value, (int, float, str, bytes, type(None))):  # equal ones may be one object
        seen.add(id(value))
    inner: list[tuple[str, Any]]
    if isinstance(value, Mapping):
        inner = [(str(key), part) for key, part in value.items()]
    # A named tuple before plain ones: its fields have names.
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        inner = list(zip(value._fields, value, strict=True))
    elif isinstance(value, (list, tuple)):
        inner = [(name, part) for part in value]
    elif is_dataclass(value) and not isinstance(value, type):
        inner = [(field.name, getattr(value, field.name)) for field in fields(value)]
    else:
        yield name, value
        return
    for part_name, part in inner:
        yield from named_leaves(part, part_name, seen)


def is_keyed(leaf: Any) -> bool:
    """Whether a leaf is a KeyedJaggedTensor. By an attribute, so that batches without one need not
    import torchrec."""
    return hasattr(leaf, "stride_per_key")


def ids_by_feature(batch: Any) -> dict[str, Tensor]:
    """Return the tensors of integers of a batch by name, masks included; of a KeyedJaggedTensor
    each key's values."""
    ids: dict[str, Tensor] = {}
    for name, leaf in named_leaves(batch):
        if is_keyed(leaf):
            ids |= {key: jagged.values() for key, jagged in leaf.to_dict().items()}
        elif isinstance(leaf, Tensor) or hasattr(leaf, "lengths"):
            ids[name] = leaf if isinstance(leaf, Tensor) else leaf.values()
    return {
        name: tensor
        for name, tensor in ids.items()
        if not (tensor.is_floating_point() or tensor.is_complex())
    }


def fingerprint(batch: Any) -> str:
    """Return a digest of a batch's tensors, of their first elements; "" where it has none."""
    digest = hashlib.blake2b(digest_size=16)
    count = 0
    for name, leaf in named_leaves(batch):
        tensors = [leaf.values(), leaf.lengths()] if hasattr(leaf, "lengths") else [leaf]
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                sample = tensor.detach().reshape(-1)[:SAMPLED_ELEMENTS].cpu().contiguous()
                digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(sample.view(torch.uint8).numpy().tobytes())
                count += 1
    return digest.hexdigest() if count else ""


class RankReports:
    """One report of each rank, plain values, in the store, where a rank reads all without waiting
    for others."""

    def __init__(self) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self._rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        # A key is set without waiting for any rank, as a collective would.
        self._store = default_store() if several else dist.HashStore()
        number = next(_numbers)
        self._keys = [f"lightning_distrec/reports/{number}/{rank}" for rank in range(num_ranks)]

    def put(self, report: Any) -> None:
        """Leave this rank's report."""
        self._store.set(self._keys[self._rank], json.dumps(report))

    def take(self) -> list[Any] | None:
        """Return all reports in the order of the ranks, and remove them, on one rank; None until
        all are there."""
        if not self._store.check(self._keys):
            return None
        reports = [json.loads(self._store.get(key)) for key in self._keys]
        for key in self._keys:
            self._store.delete_key(key)
        return reports
