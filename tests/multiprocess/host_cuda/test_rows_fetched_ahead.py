"""FBGEMM's own `prefetch`, a batch ahead on a stream of its own, on a CUDA device in host memory.

Nothing of ours calls it yet. It is exact with updates in between, and where rows are written back
before they are used. A lookup that comes in between takes what was fetched for another batch.
"""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from tests.support.host_cuda.kernels import (
    DIMS,
    RATE,
    ROWS,
    TABLE_OF_FEATURE,
    bags_of,
    factors,
    first_rows,
)
from tests.support.host_cuda.runs import device_ranks

pytestmark = pytest.mark.slow

STEPS = 8


def _train(share: float, is_ahead: bool, flushed: int | None = None) -> list[Tensor]:
    """Return what was looked up in each step, and the rows at the end.

    share: of the rows that the cache holds. flushed: the step before whose lookup rows are written
    back.
    """
    device = torch.device("cuda:0")
    place, compute = EmbeddingLocation.MANAGED_CACHING, ComputeDevice.CUDA
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, place, compute) for rows, dim in zip(ROWS, DIMS, strict=True)],
        optimizer=EmbOptimType.EXACT_ADAGRAD,
        learning_rate=RATE,
        eps=1e-8,
        pooling_mode=PoolingMode.SUM,
        feature_table_map=list(TABLE_OF_FEATURE),
        cache_load_factor=share,
        prefetch_pipeline=is_ahead,
        device=device,
    )
    for number, weight in enumerate(kernel.split_embedding_weights()):
        weight.copy_(first_rows(number, DIMS[number]))
    stream, main = torch.cuda.Stream(), torch.cuda.current_stream()

    def batch_of(step: int) -> tuple[Tensor, Tensor]:
        ids, offsets, _ = (part.to(device) for part in bags_of(step))
        if is_ahead:
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                ids.record_stream(stream)
                offsets.record_stream(stream)
                kernel.prefetch(ids, offsets, forward_stream=main)
        return ids, offsets

    results, batch = [], batch_of(0)
    for step in range(STEPS):
        main.wait_stream(stream)
        if step == flushed:
            kernel.flush()
        rows = kernel(*batch)
        if step + 1 < STEPS:
            batch = batch_of(step + 1)
        (rows * factors(rows)).sum().backward()
        results.append(rows.detach().cpu())
    kernel.flush()
    return results + [weight.cpu() for weight in kernel.split_embedding_weights()]


def _train_each(share: float) -> list[list[Tensor]]:
    return [_train(share, False), _train(share, True), _train(share, True, flushed=3)]


@pytest.mark.parametrize("share", [0.2, 0.4])
def test_rows_that_are_fetched_a_batch_ahead_have_all_updates(share: float) -> None:
    with device_ranks(1) as ranks:
        (seen,) = ranks.call(_train_each, share)
    assert not seen.error, seen.error
    assert seen.hazards == []
    expected, ahead, flushed = seen.result
    torch.testing.assert_close(ahead, expected, atol=0, rtol=0)
    torch.testing.assert_close(flushed, expected, atol=0, rtol=0)
