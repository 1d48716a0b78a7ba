"""Ranks of targets, and what they are worth, are those of a sorted list and of torchmetrics."""

import math

import pytest
import torch
from torch import Tensor
from torchmetrics.functional import retrieval as plain

from lightning_distrec.errors import ConfigError, DataError
from lightning_distrec.metrics import (
    MRR,
    HitRateAtK,
    NDCGAtK,
    RecallAtK,
    ranks_in_scores,
    retrieval_metrics,
    target_ranks,
)


def drawn(
    queries: int, candidates: int, targets: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return query vectors, candidate vectors, targets and excluded ids; scores are small integers
    with many ties."""
    draw = torch.Generator().manual_seed(seed)
    vectors = [
        torch.randint(-2, 3, (number, 4), generator=draw).float()
        for number in (queries, candidates)
    ]
    picked = torch.stack([
        torch.randperm(candidates, generator=draw)[: targets + 3] for _ in range(queries)
    ])
    picked = torch.where(torch.rand(picked.shape, generator=draw) < 0.2, -1, picked)
    # Some targets are excluded as well, and count all the same.
    excluded = torch.cat([picked[:, targets:], picked[:, :1]], dim=1)
    return vectors[0], vectors[1], picked[:, :targets], excluded


def rank_by_sorting(scores: Tensor, target: int, excluded: set[int]) -> int:
    """Return the place of a target in a sorted list, slowly."""
    remaining = [
        float(s) for place, s in enumerate(scores) if place not in excluded and place != target
    ]
    return 1 + sum(score >= float(scores[target]) for score in remaining)


def test_ranks_are_places_in_a_sorted_list():
    queries, candidates, targets, excluded = drawn(30, 40, 2)
    scores = queries @ candidates.T
    truth = torch.zeros_like(targets)
    for query, (row, left_out) in enumerate(zip(targets.tolist(), excluded.tolist(), strict=True)):
        for place, target in enumerate(row):
            if target >= 0:
                truth[query, place] = rank_by_sorting(
                    scores[query], target, set(left_out) - set(row)
                )
    assert torch.equal(ranks_in_scores(scores, targets, excluded), truth)
    for max_bytes in (2**28, 300, 1):  # one block, some blocks, one candidate at a time
        actual = target_ranks(
            queries, targets, candidates, 40, excluded=excluded, max_bytes=max_bytes
        )
        assert torch.equal(actual, truth)


def test_a_score_that_is_no_number_gets_the_last_rank():
    scores = torch.tensor([[math.nan, 1.0, math.inf], [0.0, math.nan, 0.0]])
    assert ranks_in_scores(scores, torch.tensor([0, 1])).tolist() == [3, 3]
    assert ranks_in_scores(torch.zeros(1, 5), torch.tensor([2])).tolist() == [5]


def test_ids_name_candidates_in_any_order():
    queries, candidates, targets, _ = drawn(10, 20, 1, seed=1)
    order = torch.randperm(20)
    actual = target_ranks(
        queries,
        order[targets[:, 0]].where(targets[:, 0] >= 0, -1) * 10,
        candidates,
        20,
        ids=order * 10,
    )
    assert torch.equal(actual, ranks_in_scores(queries @ candidates.T, targets[:, 0]))


@pytest.mark.parametrize("k", [1, 3, 10])
def test_metrics_are_those_of_torchmetrics(k):
    draw = torch.Generator().manual_seed(k)
    scores = torch.rand(50, 12, generator=draw)
    relevant = torch.rand(50, 12, generator=draw) < 0.2
    targets = torch.where(relevant, torch.arange(12), -1)
    ranks = ranks_in_scores(scores, targets)
    functions = {
        RecallAtK: lambda s, t: plain.retrieval_recall(s, t, top_k=k),
        HitRateAtK: lambda s, t: plain.retrieval_hit_rate(s, t, top_k=k),
        NDCGAtK: lambda s, t: plain.retrieval_normalized_dcg(s, t, top_k=k),
        MRR: lambda s, t: plain.retrieval_reciprocal_rank(s, t, top_k=k),
    }
    for kind, function in functions.items():
        metric = kind(k)
        for part in ranks.split(7):
            metric.update(part)
        truth = torch.stack([
            function(s, t) for s, t in zip(scores, relevant, strict=True) if t.any()
        ]).mean()
        assert float(metric.compute()) == pytest.approx(float(truth), abs=1e-6), kind


def test_a_collection_keeps_apart_what_was_equal_in_the_first_batch():
    metrics = retrieval_metrics(1, 5, prefix="val/")
    metrics.update(torch.tensor([9, 0]))
    metrics.update(torch.tensor([3, 1, 0, 0]))
    actual = {name: float(value) for name, value in metrics.compute().items()}
    third = pytest.approx(1 / 3)
    assert (
        actual["val/recall_at_1"] == actual["val/hit_rate_at_1"] == actual["val/ndcg_at_1"] == third
    )
    assert actual["val/recall_at_5"] == actual["val/hit_rate_at_5"] == pytest.approx(2 / 3)
    assert actual["val/ndcg_at_5"] == pytest.approx((1 + 0.5) / 3)
    assert actual["val/mrr"] == pytest.approx((1 / 9 + 1 / 3 + 1) / 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda q, c, t: target_ranks(q, t, c, 9),
            r"\[8\] candidates: neither slices of num_candidates=9",
        ),
        (lambda q, c, t: target_ranks(q[:, 1:], t, c, 8), "same dim"),
        (lambda q, c, t: target_ranks(q, t[1:], c, 8), "one row for each query"),
        (lambda q, c, t: target_ranks(q, t, c, 8, excluded=t), r"excluded .* must be int64"),
        (lambda q, c, t: target_ranks(q, t, c, 8, ids=torch.zeros(8).long()), "distinct"),
        (lambda q, c, t: target_ranks(q, t, c, 8, ids=t), "one for each candidate"),
        (lambda q, c, t: target_ranks(q, t, c, 8, max_bytes=0), "at least 1"),
        (lambda q, c, t: ranks_in_scores(q @ c.T, t[1:]), "do not fit"),
        (lambda q, c, t: RecallAtK(0), "k=0 must be at least 1"),
        (lambda q, c, t: MRR().update(q), "must be integers"),
        (lambda q, c, t: retrieval_metrics(), "at least one k"),
    ],
)
def test_what_does_not_fit_is_an_error(call, message):
    queries, candidates, targets, _ = drawn(3, 8, 1)
    with pytest.raises(ConfigError, match=message):
        call(queries, candidates, targets[:, 0])


def test_a_target_that_is_no_candidate_is_an_error():
    queries, candidates, _, _ = drawn(2, 8, 1)
    with pytest.raises(DataError, match="target 8 is no candidate, of 8"):
        target_ranks(queries, torch.tensor([8, 0]), candidates, 8)
