"""A loss over all rows lets the optimizer step on tables that would be updated inside of backward,
and on those that share their kernel, from the first step on."""

from typing import Any

import torch
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_distrec.retrieval import softmax_loss
from tests.support.ranks import run_each_on_ranks
from tests.support.retrieval_models import (
    DIM,
    HISTORY,
    ROWS,
    Batch,
    Retrieving,
    differences,
    make_batch,
    train,
    train_plain,
)

STEPS = 3
SIZES = (3, 5)
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.3),
    # It takes no vectors.
    "RowWiseAdagrad": lambda parameters: RowWiseAdagrad(
        [parameter for parameter in parameters if parameter.ndim == 2], lr=0.05
    ),
}


class TwoTables(Retrieving):
    """Two tables of one collection, of which one has a loss over all rows."""

    def __init__(self, optimizer: str) -> None:
        super().__init__("bags", _loss, optimizer)
        tables = []
        for name in ("item", "user"):
            config = EmbeddingBagConfig(
                name=name, feature_names=[name], num_embeddings=ROWS, embedding_dim=DIM
            )
            tables.append(config)
        self.items = EmbeddingBagCollection(tables=tables)

    def queries(self, batch: Batch) -> Tensor:
        history = batch["history"]
        ids = torch.cat([history.flatten(), (history + 1).flatten() % ROWS])
        lengths = torch.full((2 * len(history),), HISTORY)
        bags = self.items(KeyedJaggedTensor(["item", "user"], ids, lengths=lengths))
        return self.tower(bags["item"] + bags["user"])  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


def _loss(model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
    return softmax_loss(queries, model.table, batch["targets"])


def _model(optimizer: str) -> TwoTables:
    torch.manual_seed(3)
    return TwoTables(optimizer)


def _batches() -> list[list[Batch]]:
    steps = []
    for step in range(STEPS):
        steps.append([make_batch(10 * step + rank, size) for rank, size in enumerate(SIZES)])
    return steps


def _train(optimizer: str) -> dict[str, Any]:
    model, kinds = _model(optimizer), []

    def note() -> None:
        updates = model.trainer.strategy.run_tables.updates  # type: ignore[attr-defined]
        kinds.append([update.kind for update in updates.values()])

    model.on_train_start = model.on_train_epoch_end = note  # type: ignore[method-assign]
    strategy = {"sharding_types": ["row_wise"], "find_unused_parameters": True}
    return train(model, _batches(), strategy) | {"kinds": kinds}


def test_all_tables_of_the_kernel_have_the_numbers_of_one_process() -> None:
    (actual, _) = run_each_on_ranks({name: (_train, name) for name in OPTIMIZERS}, 2)
    for optimizer, kind in (("SGD", "sparse"), ("RowWiseAdagrad", "dense")):
        assert actual[optimizer]["kinds"] == [["fused", "fused"], [kind, kind]]
        expected = train_plain(_model(optimizer), _batches())
        difference = differences(actual[optimizer]["state"], expected)
        assert max(difference.values()) < 2e-6, difference
