"""What a rank sends for a loss over all rows: queries, their gradients, and a few numbers for each,
whatever the number of rows."""

from typing import Any

from torch import Tensor
from torch.nn import functional

from lightning_distrec import Communication
from lightning_distrec.retrieval import softmax_loss, top_k
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.retrieval_models import (
    DIM,
    Batch,
    Retrieving,
    make_batch,
    seeded,
    strategy_of,
    train,
)

QUERIES, K, STEPS, NUM_ROWS = 6, 3, 4, 1000
NUM_RANKS = 2


def _looked_up(model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
    return queries.square().mean()


def _full(model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
    return softmax_loss(queries, model.table, batch["targets"])


def _ordinary(model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
    return functional.cross_entropy(queries @ model.items.weight.T, batch["targets"])


def _best(model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
    top_k(queries, model.table, K)
    return queries.square().mean()


def _sent(loss: Any) -> float:
    """Return the bytes that this rank sends in a step."""
    communication = Communication()
    strategy = strategy_of("embedding", "row_wise", find_unused_parameters=True)
    strategy |= {"embedding_update": "sparse", "convert_embeddings": ["items"]}
    batches = [[make_batch(step, QUERIES, NUM_ROWS)] * NUM_RANKS for step in range(STEPS)]
    model = seeded("embedding", loss, "SGD", NUM_ROWS)
    train(model, batches, strategy, callbacks=[communication])
    gathered = communication._gathered
    assert gathered is not None
    by_kind = gathered[rank_and_num_ranks()[0], :, 0]
    return float(by_kind.sum())


CALLS = {"none": _looked_up, "softmax_loss": _full, "ordinary": _ordinary, "top_k": _best}


def test_what_is_sent_grows_with_queries_and_not_with_rows() -> None:
    sent = run_each_on_ranks({name: (_sent, loss) for name, loss in CALLS.items()}, NUM_RANKS)[0]
    others = NUM_RANKS - 1
    # Queries and their gradients in float32; targets, and the factors of gradients.
    to_each_rank = QUERIES * (4 * DIM + 4 * DIM + 8 + 4)
    # The maximum and two sums of each query, in float64, by a ring.
    reduced = 2 * 3 * 8 * QUERIES
    # Queries, excluded rows (none), and k scores and rows of each query of the others.
    best = QUERIES * (4 * DIM + (4 + 8) * K)
    expected = {"softmax_loss": others * (to_each_rank + reduced), "top_k": others * best}
    expected["ordinary"] = expected["softmax_loss"]
    for name, size in expected.items():
        # And a control message, by which ranks agree on the call.
        assert 0 <= sent[name] - sent["none"] - size <= 64, (name, size)
