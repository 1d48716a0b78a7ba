"""On one device: FBGEMM's kernels with kept arguments, deterministic metrics, rows of ids, and what
pipelines log."""

from collections.abc import Iterator
from contextlib import contextmanager
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

from lightning_distrec._compat.fbgemm import KernelCall
from lightning_distrec.gpu import require_kernels
from lightning_distrec.metrics import GAUC, DecayedAUC, WindowedAUC
from lightning_distrec.metrics.retrieval import NDCGAtK
from lightning_distrec.pipeline.step_effects import on_host, to_device
from lightning_distrec.sharding.mapping.id_mapping import IdMapping
from lightning_distrec.sharding.mapping.spec import MappingSpec
from tests.gpu.device import DEVICE, own_device
from tests.gpu.marks import runs_here

pytestmark = runs_here

ROWS, DIM = (1000, 60), 8
LOCATIONS = ("DEVICE", "MANAGED") if DEVICE == "cuda" else ("HOST",)


def _kernel(optimizer: EmbOptimType, location: str) -> Any:
    torch.manual_seed(1)
    compute = ComputeDevice.CUDA if DEVICE == "cuda" else ComputeDevice.CPU
    kernel = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, DIM, EmbeddingLocation[location], compute) for rows in ROWS],
        optimizer=optimizer,
        learning_rate=0.1,
        device=own_device() if DEVICE == "cuda" else None,
    )
    for number, weight in enumerate(kernel.split_embedding_weights()):
        draw = torch.Generator().manual_seed(number)
        weight.copy_(torch.rand(weight.shape, generator=draw))
    return kernel


def _train(kernel: Any, look_up: Any) -> list[Tensor]:
    """Return looked-up rows and weights of steps with other batch sizes and rates; each id occurs
    once in a step."""
    results = []
    for step, size in enumerate((7, 20, 1, 20)):
        draw = torch.Generator().manual_seed(step)
        # FBGEMM's backward on a GPU adds gradients of equal ids in no fixed order.
        ids = torch.cat([torch.randperm(rows, generator=draw)[: 2 * size] for rows in ROWS])
        offsets = torch.arange(0, len(ids) + 1, 2)
        kernel.set_learning_rate(0.1 / (1 + step))
        rows = look_up(ids.to(own_device()), offsets.to(own_device()))
        (rows * torch.arange(2 * DIM, device=rows.device)).sum().backward()
        results.append(rows.detach().cpu())
    return [*results, *(weight.cpu() for weight in kernel.split_embedding_weights())]


@pytest.mark.parametrize("location", LOCATIONS)
@pytest.mark.parametrize(
    "optimizer",
    [EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD],
)
def test_a_kernel_that_is_called_with_kept_arguments_leaves_its_own_bits(
    optimizer: EmbOptimType, location: str
) -> None:
    require_kernels(own_device())
    kernel, other = _kernel(optimizer, location), _kernel(optimizer, location)
    for actual, expected in zip(
        _train(kernel, KernelCall(kernel)), _train(other, other), strict=True
    ):
        assert torch.equal(actual, expected)


def _examples(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    preds = torch.randint(1, 40, (400,), generator=draw) / 41
    labels = (torch.rand(400, generator=draw) < preds).float()
    return preds.to(device), labels.to(device), torch.randint(30, (400,), generator=draw).to(device)


@pytest.mark.parametrize("name", ["GAUC", "DecayedAUC", "WindowedAUC", "NDCG"])
def test_metrics_are_those_of_a_cpu_where_they_must_be_deterministic(name: str) -> None:
    def compute(device: torch.device) -> float:
        preds, labels, users = _examples(device)
        if name == "NDCG":
            metric: Any = NDCGAtK(3).to(device)
            metric.update(users.view(-1, 2))
        else:
            metric = {"GAUC": GAUC(), "DecayedAUC": DecayedAUC(), "WindowedAUC": WindowedAUC(200)}[
                name
            ].to(device)
            metric.update(preds, labels, *([users] if name == "GAUC" else []))
        return float(metric.compute())

    expected = compute(torch.device("cpu"))
    torch.use_deterministic_algorithms(True)
    try:
        assert compute(own_device()) == pytest.approx(expected, abs=1e-9)
    finally:
        torch.use_deterministic_algorithms(False)


def _map_ids(policy: Any, device: torch.device) -> list[Tensor]:
    """Return the tensors of a mapping, and rows, after lookups in which ids lose rows. Waits for a
    GPU are errors."""
    mapping = IdMapping(
        MappingSpec(96, 6, max_probe=9, policy=policy, min_sights=2, num_reserved=2), 0, 6, device
    )
    for step in range(8):
        draw = torch.Generator().manual_seed(step)
        ids = ((torch.rand(64, generator=draw) ** 3 * 1000).long() * 1_234_567 + 3).to(device)
        with _waits_are_errors(device):
            numbers = mapping.note_lookup(ids)
        numbers = numbers.tolist()  # the one read of a lookup
        with _waits_are_errors(device):
            mapping.learn(numbers)
            mapping.optimizer_stepped()
            rows = mapping.find(ids)
    assert policy == "none" or mapping.counts.evicted > 10
    return [tensor.cpu() for tensor in (*mapping.tensors.values(), rows)]


@contextmanager
def _waits_are_errors(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("policy", ["none", "lru", "lfu"])
def test_ids_have_the_rows_of_a_cpu_and_the_host_waits_for_one_number(policy: str) -> None:
    for actual, expected in zip(
        _map_ids(policy, own_device()), _map_ids(policy, torch.device("cpu")), strict=True
    ):
        assert torch.equal(actual, expected)


def test_what_a_pipeline_logs_comes_to_the_host_and_back_with_its_bits() -> None:
    values = [
        torch.ones((), dtype=torch.float64),
        torch.arange(3),
        torch.randn(2, 3).bfloat16(),
        torch.tensor(True),
    ]
    on_device = [value.to(own_device()) for value in values]
    moved = on_host(on_device)
    for actual, expected in ((moved, values), (to_device(moved, own_device()), on_device)):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
