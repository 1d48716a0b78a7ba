"""A module that multiplies queries by the weight of its table trains as it is, sharded."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_distrec.retrieval import softmax_loss
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

Loss = Callable[[Retrieving, Tensor, Batch], Tensor]
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


def _full(model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
    if dist.is_initialized():
        return softmax_loss(queries, model.table, batch["targets"], max_bytes=512)
    return functional.cross_entropy(queries @ model.weight.T, batch["targets"])


WHOLE: dict[str, Loss] = {
    "softmax_loss": _full,
    "under no_grad": _without_graph,
    "without autocast": _with_all_digits,
}
"""Losses of queries and a batch."""
NAMES = [*LOGITS, *WHOLE]


def loss_of(name: str, model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
    """Return the loss of a module that knows nothing of shards."""
    if name in WHOLE:
        return WHOLE[name](model, queries, batch)
    loss = list(LOSSES.values())[NAMES.index(name) % len(LOSSES)]
    return loss(LOGITS[name](model, queries), batch["targets"])


def _batches(sizes: tuple[int, ...]) -> list[list[Batch]]:
    steps = []
    for step in range(STEPS):
        steps.append([make_batch(100 * step + rank, size) for rank, size in enumerate(sizes)])
    return steps


def _model(name: str, sizes: tuple[int, ...]) -> Retrieving:
    # Bags show how many examples a rank has, by which its loss is weighted.
    kind = "embedding" if len(set(sizes)) == 1 else "bags"
    optimizer = ("SGD", "Adagrad", "Adam")[NAMES.index(name) % 3]
    return seeded(kind, partial(loss_of, name), optimizer)


def _train(name: str, sizes: tuple[int, ...]) -> dict[str, Any]:
    model = _model(name, sizes)
    sharding_type = ("row_wise", "row_wise", "table_wise", "column_wise")[NAMES.index(name) % 4]
    strategy = strategy_of(model.kind, sharding_type, find_unused_parameters=True)
    # By its path, for a table whose weight is read stays whole otherwise.
    strategy["convert_embeddings"] = ["items"] if model.kind == "embedding" else "all"
    if name == "softmax_loss":
        strategy["embedding_update"] = "sparse"
    return train(model, _batches(sizes), strategy)


@pytest.mark.parametrize("sizes", [pytest.param((4, 4), marks=pytest.mark.slow), (4, 1, 3)])
def test_losses_and_weights_are_those_of_one_process(sizes: tuple[int, ...]) -> None:
    actual = run_each_on_ranks({name: (_train, name, sizes) for name in NAMES}, len(sizes))
    for name in NAMES:
        expected = train_plain(_model(name, sizes), _batches(sizes))
        difference = differences(actual[0][name]["state"], expected)
        assert max(difference.values()) < LIMIT, f"{name}: {difference}"


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


def test_the_best_rows_of_an_evaluation_are_those_of_one_process() -> None:
    steps = ("validate", "predict")
    actual = run_each_on_ranks({step: (_evaluated, step) for step in steps}, 2)
    torch.manual_seed(3)
    expected = Evaluated("embedding", functional.cross_entropy, "SGD")
    for rank in range(2):
        expected.on_validation_start()
        with torch.no_grad():
            expected.validation_step(make_batch(rank, 4 - rank), 0)
        for step in steps:
            torch.testing.assert_close(actual[rank][step], expected.results)
