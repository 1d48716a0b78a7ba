"""Metrics over ranks are those of one process that has seen all examples."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_distrec.errors import ConfigError, DataError
from lightning_distrec.metrics import (
    GAUC,
    Calibration,
    DecayedAUC,
    NormalizedEntropy,
    TaskMetrics,
    WindowedAUC,
    retrieval_metrics,
    slice_of_rank,
    target_ranks,
)
from lightning_distrec.retrieval import target_ranks_in_table
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import make_trainer
from tests.unit.metrics.test_example_metrics import examples
from tests.unit.metrics.test_retrieval_metrics import drawn

QUERIES, CANDIDATES = 23, 50


def _join() -> tuple[int, int]:
    """Return this rank and the number of ranks, which have a process group from here on."""
    rank, num_ranks = rank_and_num_ranks()
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=rank, world_size=int(os.environ["WORLD_SIZE"]))
    return rank, num_ranks


def _ranked(held: str, max_bytes: int) -> tuple[Tensor, dict[str, float]]:
    """Rank all queries: the first rank has none of them, the last one most."""
    rank, num_ranks = _join()
    queries, candidates, targets, excluded = drawn(QUERIES, CANDIDATES, 2)
    local_queries = (
        slice(3 * (rank - 1), 3 * rank) if rank < num_ranks - 1 else slice(3 * (rank - 1), QUERIES)
    )
    local_queries = slice(0, 0) if rank == 0 else local_queries
    columns, ids = slice_of_rank(CANDIDATES), None
    if held == "all":
        columns = slice(None)
    elif held == "ids":
        columns = slice(rank, None, num_ranks)
        ids = torch.arange(CANDIDATES)[columns]
    # Ranks whose queries have nothing to leave out pass a narrower tensor.
    left_out = excluded[local_queries][:, : None if rank else 0]
    ranks = target_ranks(
        queries[local_queries], targets[local_queries], candidates[columns], CANDIDATES,
        ids=ids, excluded=left_out, max_bytes=max_bytes,
    )  # fmt: skip
    metrics = retrieval_metrics(1, 5)
    metrics.update(ranks)
    return ranks, {name: float(value) for name, value in metrics.compute().items()}


def _refused() -> dict[str, str]:
    """Return the error of each call that does not fit on one rank, or on all."""
    rank, _ = _join()
    queries, candidates, targets, _ = drawn(4, 8, 1)
    block = slice_of_rank(8)
    doubled = torch.arange(8)[block].index_fill(0, torch.tensor([0]), 0)
    calls: dict[str, Any] = {
        "shape": lambda: target_ranks(queries, targets[rank:], candidates[block], 8),
        "number": lambda: target_ranks(queries, targets, candidates[block], 9),
        "differs": lambda: target_ranks(
            queries, targets, candidates[block], 8, max_bytes=100 + rank
        ),
        "absent": lambda: target_ranks(
            queries, targets * 0 + 8 * (rank == 0), candidates[block], 8
        ),
        "twice": lambda: target_ranks(queries, targets * 0, candidates[block], 8, ids=doubled),
    }
    actual = {}
    for name, call in calls.items():
        try:
            call()
        except (ConfigError, DataError) as error:
            actual[name] = str(error)
    return actual


def make_task_metrics() -> TaskMetrics:
    """Return every metric of predictions and labels, for two tasks."""
    metrics = {
        "ne": NormalizedEntropy(),
        "calibration": Calibration(),
        "gauc": GAUC(),
        "binned": GAUC(bins=50, num_users=30),
        "windowed": WindowedAUC(1000),
        "decayed": DecayedAUC(half_life=2.0),
    }
    return TaskMetrics(["click", "purchase"], metrics)


def _updated(rank: int, num_ranks: int) -> dict[str, float]:
    """Return what all metrics come to; `rank` takes each num_ranks-th example of each batch."""
    preds, labels, users, _ = examples()
    metrics = make_task_metrics()
    for first in range(0, 400, 50):
        local = slice(first + rank, first + 50, num_ranks)
        tasks = [
            {"click": values[local], "purchase": 1 - values[local]} for values in (preds, labels)
        ]
        metrics.update(*tasks, users=users[local])
    actual = {name: float(value) for name, value in metrics.compute().items()}
    gauc = metrics.tasks["click"]["binned"]
    assert isinstance(gauc, GAUC)
    return {**actual, "bound": float(gauc.error_bound())}


def _several_tasks() -> dict[str, float]:
    return _updated(*_join())


def _nothing_on_rank_0() -> float:
    """Return a GAUC of examples that the last rank has alone."""
    rank, num_ranks = _join()
    metric = GAUC()
    if rank == num_ranks - 1:
        metric.update(*examples()[:3])
    else:
        metric.update(*(entry[:0] for entry in examples()[:3]))
        metric.reset()
    return float(metric.compute())


class NextItem(LightningModule):
    """Ranks targets among the rows of a table that is sharded."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.items = torch.nn.Embedding(CANDIDATES, 4)
        self.metrics = retrieval_metrics(1, 5, prefix="val/")

    def ranks(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Return the rank of each target."""
        queries, targets, seen = batch
        return target_ranks_in_table(queries, self.items, targets, excluded=seen)

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        self.metrics.update(self.ranks(batch))
        self.log_dict(self.metrics, batch_size=len(batch[0]))


def _batches() -> list[tuple[Tensor, ...]]:
    queries, _, targets, excluded = drawn(QUERIES, CANDIDATES, 2)
    parts = [tensor.split([7, 2, 3, 0, 9, 2]) for tensor in (queries, targets, excluded)]
    return [*zip(*parts, strict=True)]


def _validated_in_table() -> dict[str, float]:
    """Validate batches of unequal sizes, as many on each rank."""
    rank, num_ranks = rank_and_num_ranks()
    batches = _batches()[rank::num_ranks]
    trainer = make_trainer({"convert_embeddings": "all"})
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    return trainer.validate(NextItem(), loader, verbose=False)[0]


HELD = [("slices", 2**20), ("slices", 700), ("ids", 700), ("all", 700)]


def _values(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.compute().items()}


def test_metrics_over_ranks_are_those_of_one_process() -> None:
    calls: dict[str, Any] = {str(case): (_ranked, *case) for case in HELD}
    calls |= {
        "refused": (_refused,),
        "tasks": (_several_tasks,),
        "one": (_nothing_on_rank_0,),
        "in table": (_validated_in_table,),
    }
    ranks = run_each_on_ranks(calls, 3)
    queries, candidates, targets, excluded = drawn(QUERIES, CANDIDATES, 2)
    truth = target_ranks(queries, targets, candidates, CANDIDATES, excluded=excluded)
    metrics = retrieval_metrics(1, 5)
    metrics.update(truth)
    for case in map(str, HELD):
        assert torch.equal(torch.cat([rank[case][0] for rank in ranks]), truth), case
        for rank in ranks:
            assert rank[case][1] == pytest.approx(_values(metrics), abs=1e-6), case

    in_table = retrieval_metrics(1, 5, prefix="val/")
    for batch in _batches():
        in_table.update(NextItem().ranks(batch))
    single = GAUC()
    single.update(*examples()[:3])
    tasks = _updated(0, 1)
    assert len(tasks) == 13
    for rank in ranks:
        assert rank["in table"] == pytest.approx(_values(in_table), abs=1e-6)
        assert rank["tasks"] == pytest.approx(tasks, abs=1e-6)
        assert rank["one"] == pytest.approx(float(single.compute()))
        refused = rank["refused"]
        assert "rank 1: targets (3, 1) of torch.int64 must be int64, one row" in refused["shape"]
        assert "neither slices of num_candidates=9" in refused["number"]
        assert "max_bytes differs between ranks: [100, 101" in refused["differs"]
        assert "target 8 is no candidate" in refused["absent"]
        assert "target 0 is a candidate twice" in refused["twice"]
