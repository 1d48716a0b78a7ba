"""Losses over all ranks' keys, and the best rows, are those of one process."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_distrec.retrieval import (
    SampledFrequency,
    contrastive_loss,
    in_batch_loss,
    target_ranks_in_table,
    top_k,
)
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.retrieval_models import (
    DIM,
    ROWS,
    Batch,
    seeded,
    strategy_of,
)
from tests.support.trainers import make_trainer

SIZES = (4, 1, 0)
"""How many queries each of three ranks has."""


def _tensors(seed: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    size = sum(SIZES)
    return {
        "queries": torch.randn(size, DIM, generator=draw),
        "keys": torch.randn(size, DIM, generator=draw),
        "negatives": torch.randn(size, 2, DIM, generator=draw),
        "ids": torch.randint(0, 3, (size,), generator=draw),
        "log_q": torch.rand(size, generator=draw).log(),
    }


LEARNED = ("queries", "keys", "negatives")


def _in_batch(t: dict[str, Tensor], **options: Any) -> Tensor:
    return in_batch_loss(
        t["queries"], t["keys"], t["ids"], log_q=t["log_q"], negatives=t["negatives"], **options
    )


def _contrastive(t: dict[str, Tensor], **options: Any) -> Tensor:
    return contrastive_loss(t["queries"], t["keys"], t["ids"], negatives=t["negatives"], **options)


RAW = {"in batch": _in_batch, "contrastive": _contrastive}


def _gradients(name: str, rank: int | None) -> tuple[float, dict[str, Tensor]]:
    tensors = _tensors(1)
    if rank is not None:
        tensors = {key: value.split(SIZES)[rank].clone() for key, value in tensors.items()}
    for key in LEARNED:
        tensors[key].requires_grad_()
    loss = RAW[name](tensors, reduction="global_mean")
    loss.backward()
    return float(loss.detach()), {key: tensors[key].grad for key in LEARNED}


def _on_rank(name: str) -> tuple[float, dict[str, Tensor]]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return _gradients(name, rank_and_num_ranks()[0])


def _frequencies() -> list[Tensor]:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    frequency = SampledFrequency(50)
    ids = _frequency_ids(rank_and_num_ranks()[0])
    return [frequency(step_ids) for step_ids in ids]


def _frequency_ids(rank: int) -> list[Tensor]:
    every_step = torch.tensor([7 + rank])
    return [torch.cat([every_step, torch.tensor([3])[: step % 2]]) for step in range(40)]


def test_gradients_of_keys_come_back_from_all_ranks() -> None:
    calls: dict[str, tuple[Any, ...]] = {name: (_on_rank, name) for name in RAW}
    actual = run_each_on_ranks(calls | {"frequency": (_frequencies,)}, 3)
    for name in RAW:
        loss, gradients = _gradients(name, None)
        assert sum(rank[name][0] for rank in actual) / 3 == pytest.approx(loss, rel=1e-5), name
        for key in LEARNED:
            joined = torch.cat([rank[name][1][key] for rank in actual])
            # Each rank has its own loss, and DDP averages.
            torch.testing.assert_close(joined / 3, gradients[key], atol=1e-6, rtol=1e-5)
    alone, odd = actual[0]["frequency"][-1].exp().tolist()
    assert alone == pytest.approx(1.0)
    assert odd == pytest.approx(3 / 2, rel=0.1)
    assert torch.equal(actual[0]["frequency"][-1][1], actual[1]["frequency"][-1][1])


class Searching(pl.LightningModule):
    """Finds the best rows of its table in predict_step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.retrieving = seeded(kind, functional.cross_entropy, "SGD")

    def predict_step(self, batch: Batch, batch_idx: int) -> tuple[Tensor, ...]:
        queries, seen = batch["queries"], batch["seen"]
        table = self.retrieving.table
        best = top_k(queries, table, 5, exclude=seen, max_bytes=600)
        everything = top_k(queries, table, ROWS)
        ranks = target_ranks_in_table(queries, table, batch["targets"], excluded=seen)
        return *best, *everything, ranks


def _search_batch() -> Batch:
    draw = torch.Generator().manual_seed(5)
    return {
        "queries": torch.randn(sum(SIZES), DIM, generator=draw),
        "seen": torch.randint(-1, ROWS, (sum(SIZES), 90), generator=draw),
        "targets": torch.randint(0, ROWS, (sum(SIZES),), generator=draw),
    }


def _search(kind: str, sharding_type: str) -> tuple[Tensor, ...]:
    trainer = make_trainer(strategy_of(kind, sharding_type, "retrieving."))
    rank = rank_and_num_ranks()[0]
    batch = {key: value.split(SIZES)[rank] for key, value in _search_batch().items()}
    return trainer.predict(Searching(kind), DataLoader([batch], batch_size=None))[0]


SEARCHES = {
    "rows": ("embedding", "row_wise"),
    "columns": ("collection", "column_wise"),
    "bags": ("bags", "table_wise"),
}


def test_the_best_rows_are_those_of_one_process() -> None:
    actual = run_each_on_ranks({case: (_search, *args) for case, args in SEARCHES.items()}, 3)
    batch = _search_batch()
    for case, (kind, _) in SEARCHES.items():
        weight = Searching(kind).retrieving.weight.detach()
        scores = batch["queries"] @ weight.T
        seen = torch.nn.functional.one_hot(batch["seen"] + 1, ROWS + 1).amax(1)[:, 1:] > 0
        left = scores.masked_fill(seen, -torch.inf)
        best, ids, _, order, ranks = (
            torch.cat(parts) for parts in zip(*(rank[case] for rank in actual), strict=True)
        )
        torch.testing.assert_close(best, left.topk(5).values)
        found = best > -torch.inf
        assert (~found).any()
        assert (ids[~found] == -1).all()
        assert torch.equal(ids[found], left.topk(5).indices[found])
        assert torch.equal(order, scores.argsort(1, descending=True))
        target_scores = scores.gather(1, batch["targets"][:, None])
        assert torch.equal(ranks, (left > target_scores).sum(1) + 1)
