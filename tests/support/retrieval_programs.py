"""Programs with losses over an item table, drawn from a seed, and the numbers of one process."""

import math
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lightning_distrec.retrieval import in_batch_loss, sampled_softmax_loss, softmax_loss
from tests.support.ranks import rank_and_num_ranks
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

MICRO_STEPS = 4
TYPES = {
    "embedding": ["row_wise", "table_wise", "column_wise"],
    "collection": ["row_wise", "table_wise", "column_wise"],
    "bags": ["row_wise", "table_wise", "column_wise", "table_row_wise", "data_parallel"],
}


@dataclass(frozen=True)
class Program:
    """What a seed draws."""

    kind: str
    sharding_type: str
    optimizer: str
    loss: str
    sizes: tuple[int, ...]
    accumulate: int
    smoothing: float
    has_bias: bool
    max_bytes: int
    precision: str
    update: str


def draw_program(seed: int, num_ranks: int) -> Program:
    """Return a program for this many ranks."""
    draw = random.Random(1000 * num_ranks + seed)
    kind = draw.choice(list(TYPES))
    losses = {
        "embedding": ["full", "ordinary", "sampled", "in_batch"],
        "collection": ["full", "ordinary", "sampled"],
        "bags": ["full", "ordinary"],
    }
    precision = draw.choice(["32-true", "32-true", "bf16-mixed"])
    optimizer = "SGD" if "16" in precision else draw.choice(["SGD", "Adagrad", "Adam"])
    sharding_type = draw.choice(TYPES[kind]) if num_ranks > 1 else "table_wise"
    has_sparse_form = optimizer != "Adam" and sharding_type != "data_parallel"
    return Program(
        kind=kind,
        sharding_type=sharding_type,
        optimizer=optimizer,
        loss=draw.choice(losses[kind]),
        sizes=tuple(draw.randint(1, 5) for _ in range(num_ranks)),
        accumulate=draw.choice([1, 2]),
        smoothing=draw.choice([0.0, 0.2]),
        has_bias=draw.random() < 0.5,
        max_bytes=draw.choice([1, 300, 2**20]),
        precision=precision,
        update=draw.choice(["auto", "sparse"]) if has_sparse_form else "auto",
    )


def _logits(program: Program, model: Retrieving, queries: Tensor) -> Tensor:
    logits = queries @ model.weight.T / model.temperature
    return logits + model.bias if program.has_bias else logits


def _loss(program: Program, model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
    targets = batch["targets"]
    shared: dict[str, Any] = {"temperature": model.temperature, "reduction": "global_mean"}
    if program.loss == "ordinary":
        # The mean over all ranks, by what a module without functions of ours has for it.
        counted = (targets >= 0).sum()
        if rank_and_num_ranks()[1] > 1:
            dist.all_reduce(counted)
        options: dict[str, Any] = {"reduction": "sum", "label_smoothing": program.smoothing}
        losses = functional.cross_entropy(_logits(program, model, queries), targets, **options)
        return losses * rank_and_num_ranks()[1] / counted
    if program.loss == "in_batch":
        keys = model.items(targets.clamp(min=0))
        return in_batch_loss(queries, keys, targets, **shared)
    if program.loss == "sampled":
        return sampled_softmax_loss(
            queries, model.table, targets, num_negatives=7, step=len(model.losses), **shared
        )
    return softmax_loss(
        queries,
        model.table,
        targets,
        bias=model.bias if program.has_bias else None,
        label_smoothing=program.smoothing,
        max_bytes=program.max_bytes,
        **shared,
    )


def _plain(program: Program, model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
    targets = batch["targets"]
    if program.loss in ("full", "ordinary"):
        logits = _logits(program, model, queries)
        return functional.cross_entropy(logits, targets, label_smoothing=program.smoothing)
    if program.loss == "in_batch":
        logits = queries @ model.weight[targets.clamp(min=0)].T / model.temperature
        own = torch.arange(len(targets))
        is_other = (targets[:, None] == targets) & (own[:, None] != own)
        return functional.cross_entropy(logits.masked_fill(is_other, -torch.inf), own)
    is_counted = targets >= 0
    queries, targets = queries[is_counted], targets[is_counted]
    draw = torch.Generator().manual_seed(len(model.losses))
    draws = torch.rand(7, dtype=torch.float64, generator=draw)
    negatives = (draws * len(model.weight)).long()
    wanted = (queries * model.weight[targets]).sum(1, keepdim=True)
    logits = torch.cat([wanted, queries @ model.weight[negatives].T], 1) / model.temperature
    # Each is expected as often.
    logits[:, 1:] += math.log(len(model.weight) / 7)
    logits[:, 1:][negatives == targets[:, None]] = -torch.inf
    return functional.cross_entropy(logits, torch.zeros_like(targets))


def _batches(program: Program) -> list[list[Batch]]:
    steps = []
    for step in range(MICRO_STEPS):
        numbered = enumerate(program.sizes)
        steps.append([make_batch(50 * step + r, size, ignored=True) for r, size in numbered])
        # One target at least counts.
        steps[-1][0]["targets"][0] = step
    return steps


def run(program: Program, **options: Any) -> dict[str, Any]:
    """Train by a program on this rank."""
    strategy = strategy_of(
        program.kind,
        program.sharding_type,
        embedding_update=program.update,
        loss_reduction="rank_mean",
        find_unused_parameters=True,
    )
    model = seeded(program.kind, partial(_loss, program), program.optimizer)
    return train(
        model,
        _batches(program),
        strategy,
        accumulate_grad_batches=program.accumulate,
        precision=program.precision,
        **options,
    )


def assert_as_one_process(
    name: str, program: Program, state: dict[str, Tensor], losses: list[list[float]]
) -> None:
    """Compare the weights after a run, and each rank's losses, with those of one process."""
    expected = train_plain(
        seeded(program.kind, partial(_plain, program), program.optimizer),
        _batches(program),
        program.accumulate,
    )
    limit = 0.03 if "16" in program.precision else 5e-6
    difference = differences(state, expected)
    assert max(difference.values()) < limit, f"{name}: {program}: {difference}"
    means = [sum(step) / len(losses) for step in zip(*losses, strict=True)]
    assert means == pytest.approx(expected.losses, rel=limit), f"{name}: {program}"
