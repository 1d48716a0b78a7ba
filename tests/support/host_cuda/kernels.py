"""FBGEMM's tables alone, trained by one of its optimizers, wherever their rows are."""

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

ROWS, DIMS, TABLE_OF_FEATURE = (30, 20), (8, 4), (0, 0, 1)
BAGS, STEPS, RATE = 5, 4, 0.1


def bags_of(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, offsets and a weight for each id: bags of 0 to 3 ids."""
    draw = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 4, (len(TABLE_OF_FEATURE) * BAGS,), generator=draw)
    sizes = lengths.view(len(TABLE_OF_FEATURE), BAGS).sum(1).tolist()
    ids = [
        torch.randint(0, ROWS[t], (n,), generator=draw)
        for t, n in zip(TABLE_OF_FEATURE, sizes, strict=True)
    ]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.cat(ids), offsets, torch.rand(sum(sizes), generator=draw)


def first_rows(table: int, dim: int) -> Tensor:
    """Return the rows that training begins with."""
    return torch.rand(ROWS[table], dim, generator=torch.Generator().manual_seed(table))


def factors(rows: Tensor) -> Tensor:
    """Return by what a loss multiplies what was looked up."""
    return torch.arange(rows.numel(), dtype=torch.float32, device=rows.device).view_as(rows) / 100


def train_kernel(
    optimizer: str, location: str, pooling: str = "SUM", weighted: bool = False
) -> list[Tensor]:
    """Return what was looked up in each step, gradients of weights of ids, and the rows at the
    end."""
    place, pool = EmbeddingLocation[location], PoolingMode[pooling]
    device = torch.device("cpu" if location == "HOST" else "cuda:0")
    compute = ComputeDevice.CPU if location == "HOST" else ComputeDevice.CUDA
    dims = DIMS if pool != PoolingMode.NONE else (8, 8)
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, place, compute) for rows, dim in zip(ROWS, dims, strict=True)],
        optimizer=EmbOptimType[optimizer],
        learning_rate=RATE,
        eps=1e-8,
        pooling_mode=pool,
        feature_table_map=list(TABLE_OF_FEATURE),
        cache_load_factor=0.4,  # so that rows leave the cache
        device=device,
    )
    for number, weight in enumerate(kernel.split_embedding_weights()):
        weight.copy_(first_rows(number, dims[number]))
    results = []
    for step in range(STEPS):
        ids, offsets, weights = (part.to(device) for part in bags_of(step))
        weights.requires_grad_()
        rows = kernel(ids, offsets, per_sample_weights=weights if weighted else None)
        (rows * factors(rows)).sum().backward()
        results.append(rows.detach().cpu())
        if weighted and weights.grad is not None:
            results.append(weights.grad.cpu())
    kernel.flush()
    return results + [weight.cpu() for weight in kernel.split_embedding_weights()]


def train_plainly(optimizer: type[torch.optim.Optimizer]) -> list[Tensor]:
    """Return the rows at the end of the same training by torch's optimizer, of sums."""
    tables = [
        torch.nn.EmbeddingBag.from_pretrained(
            first_rows(number, dim), freeze=False, mode="sum", sparse=True
        )
        for number, dim in enumerate(DIMS)
    ]
    steps = optimizer([table.weight for table in tables], lr=RATE)  # type: ignore[call-arg]
    for step in range(STEPS):
        ids, offsets, _ = bags_of(step)
        parts = []
        for feature, table in enumerate(TABLE_OF_FEATURE):
            begin = offsets[feature * BAGS : (feature + 1) * BAGS]
            last = offsets[(feature + 1) * BAGS]
            parts.append(tables[table](ids[begin[0] : last], begin - begin[0]))
        rows = torch.cat(parts, 1)
        steps.zero_grad()
        (rows * factors(rows)).sum().backward()
        steps.step()
    return [table.weight.detach() for table in tables]
