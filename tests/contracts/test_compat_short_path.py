"""The same contracts, of what the short path uses of FBGEMM's kernels and of torchrec's sharded
collections."""

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from lightning_distrec._compat import fbgemm as _fbgemm
from lightning_distrec._compat import torchrec_ids as _torchrec_ids
from tests.support.click_model import FEATURES, ClickModel, seeded, train_sharded
from tests.support.ranks import run_each_on_ranks

IDS, OFFSETS = torch.tensor([1, 2, 9, 1, 0, 4, 4]), torch.tensor([0, 2, 3, 6, 7])


def kernel_of(optimizer: EmbOptimType) -> Any:
    """Return a kernel with two tables, always with the same rows."""
    torch.manual_seed(1)
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, 8, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows in (10, 6)],
        optimizer=optimizer,
        learning_rate=0.1,
    )
    kernel.init_embedding_weights_uniform(-1, 1)
    return kernel


def learn(kernel: Any, look_up: Any, ids: Tensor, offsets: Tensor) -> Tensor:
    """Look up and update twice, with two learning rates."""
    actual = []
    for rate in (0.1, 0.3):
        kernel.set_learning_rate(rate)
        rows = look_up(ids, offsets)
        (rows * torch.arange(16)).sum().backward()
        actual.append(rows.detach())
    return torch.cat([*actual, *kernel.split_embedding_weights()[0].view(-1, 16)[None]])


@pytest.mark.parametrize(
    "optimizer",
    [EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD],
)
def test_kernel_call_leaves_the_bits_of_the_kernel_and_runs_its_python_once(
    optimizer: EmbOptimType,
) -> None:
    kernel, other = kernel_of(optimizer), kernel_of(optimizer)
    call, calls = _fbgemm.KernelCall(kernel), []
    forward = kernel.forward

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return forward(*args, **options)

    kernel.forward = counted
    small = (IDS.int(), OFFSETS.int())
    assert torch.equal(learn(kernel, call, *small), learn(other, other, IDS, OFFSETS))
    assert len(calls) == 1
    assert torch.equal(learn(kernel, call, *small), learn(other, other, IDS, OFFSETS))
    assert len(calls) == 1
    # Other memory, and hooks, are seen.
    kernel.weights_host = torch.nn.Parameter(kernel.weights_host.detach().clone())
    call(*small)
    assert len(calls) == 2
    inputs: list[Any] = []
    with torch.no_grad():
        handle = kernel.register_forward_hook(lambda *_: inputs.append(_[2]), with_kwargs=True)
        call(*small)
        handle.remove()
        call(*small)
    assert inputs[0]["indices"].dtype == torch.int64
    assert len(calls) == 4


def _sharding(sharding_type: str) -> list[Any]:
    model = seeded(ClickModel, torch.optim.SGD, {"lr": 0.1})
    seen: list[Any] = []

    def look() -> None:
        sharded: Any = model.trainer.strategy.run_tables.shards.sharded["ebc"]
        actual = _torchrec_ids.pooled_sharding(sharded)
        if actual is None:
            return
        if not sharded._input_dists:  # torchrec makes them with its first exchange
            sharded._create_input_dist(FEATURES)
        blocks = getattr(sharded._input_dists[0], "_feature_block_sizes_tensor", None)
        names = sharded._embedding_shardings[0].feature_names()
        rank_results = [name for rank_result in actual.features for name in rank_result]
        widths = [width for rank_result in actual.widths for width in rank_result]
        seen.append((
            rank_results == (names if blocks is None else names * 2),
            actual.names == sharded._embedding_names,
            actual.num_rows is None
            or [-(-rows // 2) for rows in actual.num_rows] == blocks.tolist(),
            widths[: len(actual.names)] == sharded._embedding_dims,
            actual.group.size(),
            actual.divisor,
        ))

    model.on_train_end = look  # type: ignore[method-assign]
    few = {name: {"min_partition": 4} for name in ("narrow", "shared")}
    train_sharded(model, 2, {"sharding_types": [sharding_type], "tables": few})
    return seen


def test_pooled_sharding_is_how_torchrec_has_sharded_a_collection() -> None:
    numbers = {"table_wise": 1, "row_wise": 1, "column_wise": 0}
    for seen in run_each_on_ranks({name: (_sharding, name) for name in numbers}, 2):
        for name, number in numbers.items():
            assert seen[name] == [(True, True, True, True, 2, 2)] * number
