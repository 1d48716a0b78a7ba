"""Gradients of rows that were looked up several times, summed as on a GPU."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torch.nn.functional import embedding_bag

from lightning_distrec.sharding.row_gradients import LocalShard, give_gradients, local_shards_of
from tests.support.host_cuda.following import Found, followed_device

TABLES = {"a": (7, 4), "empty": (3, 8), "b": (50, 8)}
FEATURES = [0, 0, 1, 2]
BAGS = 40


def kernel_and_shards(features: list[int], device: str = "cpu") -> tuple[Any, list[LocalShard]]:
    place = (EmbeddingLocation.HOST, ComputeDevice.CPU)
    if device == "cuda":
        place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    specs = [(*item, *place) for item in TABLES.values()]
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        specs,
        feature_table_map=features,
        optimizer=EmbOptimType.EXACT_SGD,
        pooling_mode=PoolingMode.SUM,
        table_names=list(TABLES),
        device=torch.device(device),
    )
    draw = torch.Generator().manual_seed(1)
    for weight in kernel.split_embedding_weights():
        weight.copy_(torch.rand(weight.shape, generator=draw) * 2 - 1)
    shards = local_shards_of(kernel)
    give_gradients(kernel, shards)
    return kernel, shards


def ids_of(features: list[int]) -> tuple[Tensor, Tensor]:
    """Return ids that repeat, and offsets; the feature of the second table has none."""
    draw = torch.Generator().manual_seed(2)
    lengths = torch.randint(0, 5, (len(features), BAGS), generator=draw)
    lengths[features.index(1)] = 0
    heights = [list(TABLES.values())[table][0] for table in features]
    counts = lengths.sum(1).tolist()
    ids = [
        torch.randint(0, height, (n,), generator=draw)
        for height, n in zip(heights, counts, strict=True)
    ]
    return torch.cat(ids), torch.cat([
        torch.zeros(1, dtype=torch.long),
        lengths.flatten().cumsum(0),
    ])


def gradients(features: list[int], device: str = "cpu") -> tuple[list[Any], Found]:
    """Return the shards' gradients on the host, and what the device reports of backward."""
    kernel, shards = kernel_and_shards(features, device)
    ids, offsets = (item.to(device) for item in ids_of(features))
    # numbers of the kernel's features are sent to the GPU once
    kernel(indices=ids, offsets=offsets)
    actual = kernel(indices=ids, offsets=offsets)
    factors = torch.randn(actual.shape, generator=torch.Generator().manual_seed(3)).to(device)
    found = Found()
    with followed_device() if device == "cuda" else nullcontext(found) as found:
        (actual * factors).sum().backward()
    return [shard.weight.grad.cpu() for shard in shards], found


@pytest.mark.host_cuda
def test_sums_are_those_of_an_embedding_in_double_precision_and_the_host_does_not_wait() -> None:
    actual, found = gradients(FEATURES, "cuda")
    assert found.waits == []
    assert found.hazards == []
    on_cpu, _ = gradients(FEATURES)
    ids, offsets = ids_of(FEATURES)
    pieces = [slice(offsets[f * BAGS], offsets[(f + 1) * BAGS]) for f in range(len(FEATURES))]
    dims = [list(TABLES.values())[table][1] for table in FEATURES]
    factors = (
        torch
        .randn(BAGS, sum(dims), generator=torch.Generator().manual_seed(3))
        .double()
        .split(dims, dim=1)
    )
    for number, (rows, dim) in enumerate(TABLES.values()):
        weight = torch.zeros(rows, dim, dtype=torch.double, requires_grad=True)
        for f, table in enumerate(FEATURES):
            if table == number:
                own_values = offsets[f * BAGS : (f + 1) * BAGS] - offsets[f * BAGS]
                (
                    embedding_bag(ids[pieces[f]], weight, own_values, mode="sum") * factors[f]
                ).sum().backward()
        grad = actual[number]
        assert grad.is_coalesced()
        assert torch.equal(grad.indices(), on_cpu[number].coalesce().indices()), (
            "rows ascend, each of them once"
        )
        torch.testing.assert_close(grad.to_dense().double(), weight.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.host_cuda
@pytest.mark.parametrize("used", [{"a"}, {"a", "b", "empty"}])
def test_tables_that_no_loss_has_used_get_no_gradient_for_one_wait(used: set[str]) -> None:
    kernel, shards = kernel_and_shards(FEATURES, "cuda")
    for shard in shards:
        shard.used = used
    ids, offsets = (item.cuda() for item in ids_of(FEATURES))
    actual = kernel(indices=ids, offsets=offsets)
    with followed_device() as found:
        actual[:, :8].sum().backward()
    assert found.operations() == ["copy to the host"] * (used == {"a"})
    assert [shard.weight.grad is None for shard in shards] == [
        shard.table not in used for shard in shards
    ]


@pytest.mark.host_cuda
@pytest.mark.parametrize("lookups", [1, 2])
def test_a_gradient_of_one_lookup_is_known_to_be_summed(lookups: int) -> None:
    kernel, shards = kernel_and_shards(FEATURES, "cuda")
    ids, offsets = (item.cuda() for item in ids_of(FEATURES))
    sum(kernel(indices=ids, offsets=offsets).sum() for _ in range(lookups)).backward()
    for shard in shards:
        gradient = shard.weight.grad
        assert gradient.is_coalesced() or lookups > 1
        rows = gradient.coalesce().indices()[0]
        assert len(rows.unique()) == len(rows), "known to be summed, and is"
