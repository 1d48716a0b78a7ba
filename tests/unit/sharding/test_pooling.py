"""Ids per example: what is counted in batches of many shapes, and that looking at batches leaves no
trace."""

import random
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Sampler,
)
from torchrec import KeyedJaggedTensor

from lightning_distrec.prefetch.loaders import first_batches, unchanged
from lightning_distrec.sharding.planning.id_counts import IdCount, IdCounts

Pair = namedtuple("Pair", ["item", "label"])


@dataclass
class Batch:
    """What a user may put together."""

    features: KeyedJaggedTensor
    item: Tensor
    extra: Any = None


def keyed(**lengths: list[int]) -> KeyedJaggedTensor:
    """Return features with bags of these lengths."""
    flat = torch.tensor([length for key_values in lengths.values() for length in key_values])
    return KeyedJaggedTensor(keys=list(lengths), values=torch.arange(int(flat.sum())), lengths=flat)


def counted(*batches: Any) -> IdCounts:
    """Return what is counted in these batches."""
    counts = IdCounts()
    for batch in batches:
        counts.look_at(batch)
    return counts


def test_ids_are_counted_wherever_a_batch_holds_them_and_once() -> None:
    user, item = keyed(a=[1, 2, 3], b=[0, 0, 1]), keyed(c=[4, 4, 4])
    tensor = torch.zeros(3, 5, dtype=torch.long)
    batch = [
        {"user": user},
        (Batch(item, tensor), [user]),
        Pair(torch.zeros(2, 2).int(), torch.zeros(3)),
    ]
    counts = counted(batch)
    assert counts.features == {
        "a": IdCount(6, 3, 6),
        "b": IdCount(1, 3, 1),
        "c": IdCount(12, 3, 12),
    }
    assert counts.tensors == {"item": IdCount(15 + 4, 3 + 2, 1 + 1)}


class DrawsSamples:
    """Draws with generators of all kinds when a sample is taken."""

    def __init__(self) -> None:
        self.numpy, self.legacy = np.random.default_rng(1), np.random.RandomState(2)
        self.inner = {"torch": [torch.Generator().manual_seed(3)], "python": random.Random(4)}

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        (generator,) = self.inner["torch"]
        return torch.tensor([
            index,
            self.numpy.random(),
            self.legacy.rand(),
            float(torch.rand(1, generator=generator)),
            self.inner["python"].random(),
            float(torch.rand(1)),
            float(np.random.rand()),
            random.random(),
        ])  # fmt: skip


class Rotates(Sampler[int]):
    """Changes itself whenever it is begun."""

    def __init__(self, size: int) -> None:
        self.order = list(range(size))
        self.epochs = 0

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Any:
        self.epochs += 1
        self.order.append(self.order.pop(0))
        return iter(self.order)


def shuffled(**options: Any) -> DataLoader[Any]:
    return DataLoader(DrawsSamples(), 4, shuffle=True, **options)  # type: ignore[arg-type]


LOADERS: dict[str, Any] = {
    "torch's generator": shuffled,
    "a generator of its own": lambda: shuffled(generator=torch.Generator().manual_seed(5)),
    "workers": lambda: shuffled(num_workers=1, persistent_workers=True),
    "a sampler that changes itself": lambda: DataLoader(DrawsSamples(), 4, sampler=Rotates(20)),  # type: ignore[arg-type]
}


def all_seeded() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
def test_a_loader_gives_what_it_would_have_given_without_the_look(make: Any) -> None:
    all_seeded()
    expected = [list(loader) for loader in [make()] for _ in range(2)]
    all_seeded()
    loader = make()
    with unchanged(include_cuda=False):
        looked_at = list(first_batches(loader, 2))
    actual = [list(loader) for _ in range(2)]
    assert len(looked_at) == 2
    assert looked_at[0].shape == expected[0][0].shape
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
