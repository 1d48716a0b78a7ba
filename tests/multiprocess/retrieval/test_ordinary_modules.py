"""A module that multiplies queries by the weight of its table trains as it is, sharded."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.retrieval_models import (
    ROWS,
    Batch,
    Retrieving,
    differences,
    make_batch,
    seeded,
    strategy_of,
    train,
    train_plain,
)
from tests.support.trainers import make_trainer

STEPS = 3
LIMIT = 2e-6

Logits = Callable[[Retrieving, Tensor], Tensor]

LOGITS: dict[str, Logits] = {
    "T": lambda m, q: q @ m.weight.T,
    "t": lambda m, q: torch.matmul(q, m.weight.t()),
    "mT": lambda m, q: torch.mm(q, m.weight.mT) * m.temperature,
    "transpose": lambda m, q: m.temperature * (q @ m.weight.transpose(0, 1)),
    "permute": lambda m, q: (q @ m.weight.permute(1, 0) / 0.7).float(),
    "linear": lambda m, q: functional.linear(q, m.weight),
    "linear with bias": lambda m, q: functional.linear(q, m.weight, m.bias) / m.temperature,
    "plus bias": lambda m, q: q @ m.weight.transpose(-1, -2) / m.temperature + m.bias,
    "minus bias": lambda m, q: (q @ m.weight.T).contiguous() - m.bias * 2,
}


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.nll_loss(functional.log_softmax(logits, dim=-1), targets)


def _gathered(logits: Tensor, targets: Tensor) -> Tensor:
    return -logits.log_softmax(1).gather(1, targets[:, None]).squeeze(1).mean()


def _by_positions(logits: Tensor, targets: Tensor) -> Tensor:
    by_position = logits.unsqueeze(1).view(-1, 1, ROWS)
    return functional.cross_entropy(by_position.transpose(1, 2), targets[:, None])


def _flat(logits: Tensor, targets: Tensor) -> Tensor:
    flat = logits[:, None].flatten(0, 1).reshape(-1, ROWS)
    is_chosen = targets != 3
    losses = functional.cross_entropy(flat[is_chosen], targets[is_chosen], reduction="sum")
    return losses / len(targets)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": functional.cross_entropy,
    "module": nn.CrossEntropyLoss(label_smoothing=0.1),
    "sum": lambda x, t: functional.cross_entropy(x, t, reduction="none").sum() / len(t),
    "nll_loss": _nll,
    "gather": _gathered,
    "positions": _by_positions,
    "flat": _flat,
}

CASES: dict[str, tuple[str, str, str, str]] = {}
"""Name -> logits, loss, optimizer, sharding type."""
for number, logits_name in enumerate(LOGITS):
    loss_name = list(LOSSES)[number % len(LOSSES)]
    optimizer = ["SGD", "Adagrad", "Adam"][number % 3]
    sharding_type = ["row_wise", "row_wise", "table_wise", "column_wise"][number % 4]
    CASES[logits_name] = (logits_name, loss_name, optimizer, sharding_type)


def loss_of(logits: str, loss: str, model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
    """Return the loss of a module that knows nothing of shards."""
    return LOSSES[loss](LOGITS[logits](model, queries), batch["targets"])


def _batches(sizes: tuple[int, ...]) -> list[list[Batch]]:
    steps = []
    for step in range(STEPS):
        steps.append([make_batch(100 * step + rank, size) for rank, size in enumerate(sizes)])
    return steps


def _kind(sizes: tuple[int, ...]) -> str:
    # Bags show how many examples a rank has, by which its loss is weighted.
    return "embedding" if len(set(sizes)) == 1 else "bags"


def _train(case: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    logits, loss, optimizer, sharding_type = CASES[case]
    if len(sizes) == 1:
        # One rank would have several column shards, of which each is no weight.
        sharding_type = "row_wise"
    kind = _kind(sizes)
    strategy = strategy_of(kind, sharding_type, find_unused_parameters=True)
    # By its path, for a table whose weight is read stays whole otherwise.
    strategy["convert_embeddings"] = ["items"] if kind == "embedding" else "all"
    model = seeded(kind, partial(loss_of, logits, loss), optimizer)
    return train(model, _batches(sizes), strategy)


@pytest.mark.parametrize("sizes", [(5,), (4, 4), (2, 4), (4, 1, 3)])
def test_losses_and_weights_are_those_of_one_process(sizes: tuple[int, ...]) -> None:
    actual = run_each_on_ranks({case: (_train, case, sizes) for case in CASES}, len(sizes))
    for case, (logits, loss, optimizer, _) in CASES.items():
        model = seeded(_kind(sizes), partial(loss_of, logits, loss), optimizer)
        expected = train_plain(model, _batches(sizes))
        difference = differences(actual[0][case]["state"], expected)
        assert max(difference.values()) < LIMIT, f"{case}: {difference}"


class Evaluated(Retrieving):
    """Keeps what it finds in validation and prediction, and the same of the whole weight."""

    def on_validation_start(self) -> None:
        self.results: list[Tensor] = []

    on_predict_start = on_validation_start

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        queries = self.queries(batch)
        scores = queries @ self.items.weight.T / 0.5 + self.bias
        values, ids = scores.topk(3)
        losses = functional.cross_entropy(scores, batch["targets"], reduction="none")
        first = (queries * 0) @ self.items.weight.T
        self.results += [values, ids, scores.argmax(1), losses, first.detach().argmax(-1)]

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.validation_step(batch, batch_idx)
        return self.results[1]


def _evaluated(step: str) -> list[Tensor]:
    torch.manual_seed(3)
    model = Evaluated("embedding", functional.cross_entropy, "SGD")
    strategy = strategy_of("embedding", "row_wise") | {"convert_embeddings": ["items"]}
    batch = make_batch(rank_and_num_ranks()[0], 4 - rank_and_num_ranks()[0])
    trainer = make_trainer(strategy)
    getattr(trainer, step)(model, DataLoader([batch], batch_size=None))
    return model.results


@pytest.mark.parametrize("step", ["validate", "predict"])
def test_the_best_rows_of_an_evaluation_are_those_of_one_process(step: str) -> None:
    actual = run_each_on_ranks({step: (_evaluated, step)}, 2)
    torch.manual_seed(3)
    expected = Evaluated("embedding", functional.cross_entropy, "SGD")
    for rank in range(2):
        expected.on_validation_start()
        with torch.no_grad():
            expected.validation_step(make_batch(rank, 4 - rank), 0)
        torch.testing.assert_close(actual[rank][step], expected.results)


def _without_graph(model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
    logits = queries @ model.weight.T
    with torch.no_grad():
        # As in torch, no gradient comes through what is made here.
        sharper = logits / 0.5
    constant = functional.cross_entropy(sharper, batch["targets"])
    assert not constant.requires_grad
    return functional.cross_entropy(logits, batch["targets"]) + constant


def _with_all_digits(model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.autocast("cpu", enabled=False):
            logits = queries @ model.weight.T
        return functional.cross_entropy(logits, batch["targets"])


CONTEXTS = {"no_grad": _without_graph, "autocast": _with_all_digits}


def _train_in(context: str) -> dict[str, Any]:
    strategy = strategy_of("embedding", "row_wise", find_unused_parameters=True)
    strategy["convert_embeddings"] = ["items"]
    model = seeded("embedding", CONTEXTS[context], "SGD")
    return train(model, _batches((4, 4)), strategy)


def test_contexts_of_a_product_hold_for_its_loss() -> None:
    actual = run_each_on_ranks({context: (_train_in, context) for context in CONTEXTS}, 2)
    for context, loss in CONTEXTS.items():
        expected = train_plain(seeded("embedding", loss, "SGD"), _batches((4, 4)))
        difference = differences(actual[0][context]["state"], expected)
        assert max(difference.values()) < LIMIT, f"{context}: {difference}"
