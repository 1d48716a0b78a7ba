"""Rows on the host of which a GPU caches some: an emulated kernel, which trains its cache."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_distrec.sharding import shard_tables
from lightning_distrec.sharding.sharding_groups import ShardingGroups
from lightning_distrec.sharding.weights import shard_access
from lightning_distrec.sharding.weights.shard_access import GuardedTable, SharedState
from lightning_distrec.sharding.weights.shard_weight import guard
from lightning_distrec.strategies.run.lightning_callbacks import WeightCopies


class CachedKernel:
    """Has FBGEMM's names. Rows are trained in the cache; the host's are stale until `flush`, which
    keeps the cache."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(4, 2))
        self.lxu_cache_weights = torch.zeros(1)
        self.cache: dict[int, Tensor] = {}

    def look_up(self, row: int) -> Tensor:
        """Return a row, which is in the cache from now on."""
        if row not in self.cache:
            self.cache[row] = self.host[row].clone()
        return self.cache[row]

    def train(self, row: int) -> None:
        """Add 1 to a row."""
        self.look_up(row).add_(1)

    @property
    def host(self) -> Tensor:
        """The host's rows, past their guard."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.weight.detach()

    def flush(self) -> None:
        """Write the cache back."""
        with torch._C.DisableTorchFunctionSubclass():
            for row, values in self.cache.items():
                self.host[row] = values

    def reset_cache_states(self) -> None:
        """Empty the cache."""
        self.cache.clear()


@pytest.fixture
def kernel() -> Any:
    made = CachedKernel()
    weights = [made.weight]
    table = GuardedTable(
        name="table",
        shape=(4, 2),
        weights=weights,
        has_single_shards=True,
        state=SharedState(),
        rectangles=[],
    )
    guard(table, [(0, 0)])
    shard_access.watch_caches([made, CachedKernel.__new__(CachedKernel)])
    made.train(0)
    yield made
    shard_access._cached_kernels.discard(made)


def test_user_code_reads_what_was_trained(kernel: CachedKernel) -> None:
    values = (kernel.weight * 10).as_subclass(Tensor)
    assert values.tolist() == [[20, 20], [10, 10], [10, 10], [10, 10]]
    kernel.train(0)
    assert kernel.look_up(0).tolist() == [3, 3], "reading keeps the cache"


def test_what_user_code_writes_is_looked_up(kernel: CachedKernel) -> None:
    with torch.no_grad():
        kernel.weight.mul_(10)
    assert [kernel.look_up(row).tolist() for row in (0, 1)] == [[20, 20], [10, 10]]
    kernel.train(1)
    nn.init.constant_(kernel.weight, 5.0)
    assert [kernel.look_up(row).tolist() for row in (0, 1)] == [[5, 5], [5, 5]]


def test_loaded_rows_are_looked_up(kernel: CachedKernel) -> None:
    class Sharded:
        """In the place of torchrec's module, whose table is data-parallel."""

        def state_dict(self) -> dict[str, Tensor]:
            """Return the table."""
            return {"table": kernel.host}

    kernel.look_up(2)
    groups = ShardingGroups(rank=0, num_ranks=1, size=1)
    assert shard_tables._load(Sharded(), groups, "table", torch.full((4, 2), 7.0)) == ""  # type: ignore[arg-type]
    assert [kernel.look_up(row).tolist() for row in (0, 2)] == [[7, 7], [7, 7]]


def test_averages_are_of_trained_rows_and_swapping_them_is_seen(kernel: CachedKernel) -> None:
    module = nn.Module()
    module.weight = kernel.weight
    copies = WeightCopies(module, dict)
    kernel.train(0)
    for local, remote in zip(copies.parameters(), [kernel.host], strict=True):
        local.data.mul_(0).add_(remote * 100)
    copies._exchange()
    assert kernel.look_up(0).tolist() == [300, 300]
    copies._exchange()
    assert kernel.look_up(0).tolist() == [3, 3]
