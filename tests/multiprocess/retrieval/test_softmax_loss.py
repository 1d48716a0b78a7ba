"""The full softmax over a sharded table has the losses and gradients of F.cross_entropy."""

from typing import Any

import pytest
from torch import Tensor
from torch.nn import functional

from lightning_distrec.retrieval import softmax_loss
from tests.support.ranks import run_each_on_ranks
from tests.support.retrieval_models import (
    Batch,
    Retrieving,
    differences,
    make_batch,
    seeded,
    strategy_of,
    train,
    train_plain,
)

STEPS = 4
LIMIT = 2e-6


def _sharded(model: Retrieving, queries: Tensor, batch: Batch, **options: Any) -> Tensor:
    # Blocks of two or three rows, so that there are several.
    return softmax_loss(queries, model.table, batch["targets"], max_bytes=512, **options)


def _plain(model: Retrieving, queries: Tensor, batch: Batch, **options: Any) -> Tensor:
    options.pop("reduction", None)
    bias = options.pop("bias", 0.0)
    logits = queries @ model.weight.T / options.pop("temperature", 1.0) + bias
    return functional.cross_entropy(logits, batch["targets"], **options)


def sharded_loss(model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
    return _sharded(model, queries, batch)


def plain_loss(model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
    return _plain(model, queries, batch)


def all_options(model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
    return _sharded(
        model,
        queries,
        batch,
        temperature=model.temperature,
        bias=model.bias,
        label_smoothing=0.1,
        reduction="global_mean",
    )


def all_options_plain(model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
    return _plain(
        model,
        queries,
        batch,
        temperature=model.temperature,
        bias=model.bias,
        label_smoothing=0.1,
    )


LOSSES = {"default": (sharded_loss, plain_loss), "all": (all_options, all_options_plain)}


def _batches(sizes: tuple[int, ...], ignored: bool) -> list[list[Batch]]:
    steps = []
    for step in range(STEPS):
        numbered = enumerate(sizes)
        steps.append([make_batch(100 * step + r, size, ignored=ignored) for r, size in numbered])
    return steps


def _train(
    kind: str, sharding_type: str, optimizer: str, loss: str, sizes: tuple[int, ...], **options: Any
) -> dict[str, Any]:
    is_dense = optimizer == "Adam" or sharding_type == "data_parallel"
    strategy = strategy_of(
        kind,
        sharding_type,
        embedding_update="dense" if is_dense else "sparse",
        loss_reduction="rank_mean" if loss == "all" else "mean",
        find_unused_parameters=loss == "default",
    )
    model = seeded(kind, LOSSES[loss][0], optimizer)
    return train(model, _batches(sizes, loss == "all"), strategy, **options)


CASES: dict[str, tuple[Any, ...]] = {
    "row_wise SGD": ("embedding", "row_wise", "SGD", "default", (4, 4)),
    "row_wise Adagrad": ("embedding", "row_wise", "Adagrad", "default", (4, 4)),
    "row_wise Adam": ("collection", "row_wise", "Adam", "default", (4, 4)),
    "table_wise": ("embedding", "table_wise", "SGD", "default", (4, 4)),
    "column_wise": ("collection", "column_wise", "SGD", "default", (4, 4)),
    "data_parallel": ("bags", "data_parallel", "SGD", "default", (4, 4)),
    "column_wise bags": ("bags", "column_wise", "Adam", "default", (2, 5)),
    "weighted by bags": ("bags", "row_wise", "Adagrad", "default", (2, 5)),
    "all options": ("embedding", "row_wise", "SGD", "all", (2, 5)),
    "all options, Adam": ("collection", "table_wise", "Adam", "all", (6, 3)),
    "all options, columns": ("embedding", "column_wise", "Adagrad", "all", (1, 4)),
}


@pytest.mark.parametrize("num_ranks", [2])
def test_losses_and_weights_are_those_of_one_process(num_ranks: int) -> None:
    actual = run_each_on_ranks({case: (_train, *args) for case, args in CASES.items()}, num_ranks)
    for case, (kind, _, optimizer, loss, sizes) in CASES.items():
        expected = train_plain(
            seeded(kind, LOSSES[loss][1], optimizer), _batches(sizes, loss == "all")
        )
        difference = differences(actual[0][case]["state"], expected)
        assert max(difference.values()) < LIMIT, f"{case}: {difference}"
        shares = [1 / num_ranks] * num_ranks
        if loss == "default":
            shares = [size / sum(sizes) for size in sizes]
        steps = zip(*(results[case]["losses"] for results in actual), strict=True)
        means = [sum(s * value for s, value in zip(shares, step, strict=True)) for step in steps]
        assert means == pytest.approx(expected.losses, rel=1e-5), case
