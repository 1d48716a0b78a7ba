"""Ids per example: what is counted in batches of many shapes, and that looking at batches leaves no
trace."""

import random
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    Sampler,
)
from torchrec import JaggedTensor, KeyedJaggedTensor

from lightning_distrec.errors import ConfigError
from lightning_distrec.prefetch.loaders import first_batches, loaders_in, peek_obstacle, unchanged
from lightning_distrec.sharding.plain_embeddings import Conversion
from lightning_distrec.sharding.planning.id_counts import IdCount, IdCounts
from lightning_distrec.sharding.planning.table_options import PlanningOptions
from lightning_distrec.sharding.tables import find_tables

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


def test_jagged_tensors_count_under_their_names_and_features_of_unequal_batch_sizes_by_their_own() -> (
    None
):
    jagged = JaggedTensor(values=torch.arange(7), lengths=torch.tensor([3, 4]))
    unequal = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.arange(6),
        lengths=torch.tensor([1, 2, 3]),
        stride_per_key_per_rank=[[2], [1]],
    )
    actual = counted({"d": jagged}, unequal).features
    assert actual == {"d": IdCount(7, 2, 7), "a": IdCount(3, 2, 3), "b": IdCount(3, 1, 3)}


def test_a_plain_embedding_takes_the_shape_of_the_tensor_that_is_called_as_it_is() -> None:
    root = nn.Module()
    root.tower = nn.Module()
    root.tower.item = nn.Embedding(10, 8)
    (table,) = find_tables(root, Conversion("all")).tables
    assert counted({"item": torch.zeros(4, 6, dtype=torch.int32)}).factors(table) == (6.0,)
    assert counted({"tower.item": torch.zeros(4).long(), "item": torch.zeros(4, 6).long()}).factors(
        table
    ) == (1.0,)
    assert counted({"item": torch.zeros(4, 6)}).factors(table) is None, "not ids"
    assert counted({"items": torch.zeros(4, 6).long()}, torch.tensor(3)).factors(table) is None


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


class Stream(IterableDataset):
    """Can be read once."""

    def __iter__(self) -> Any:
        raise AssertionError("nobody may read it")


def test_loaders_are_found_in_what_a_trainer_takes_and_streams_are_left_alone() -> None:
    loader, stream = DataLoader(range(3)), DataLoader(Stream())  # type: ignore[arg-type]
    assert loaders_in({"a": [loader, stream], "b": CombinedLoader({"c": loader})}) == [
        loader,
        stream,
        loader,
    ]
    assert peek_obstacle(loader) == ""
    assert peek_obstacle(stream) == (
        "Stream is an IterableDataset, which may not start twice with the same batches"
    )
    assert peek_obstacle(iter([])) == (
        "a list_iterator is no DataLoader, and may not start twice with the same batches"
    )


def test_options_of_planning_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="planning.estimate_pooling=-1: a number of batches is"):
        PlanningOptions(estimate_pooling=-1)
    with pytest.raises(ConfigError, match="plan_file='': a path as a string is needed, or None"):
        PlanningOptions(plan_file="")
    with pytest.raises(ConfigError, match="min_rows=0"):
        Conversion("auto", 0)
