"""What does not fit is one error on all ranks, before anything else is exchanged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from lightning_distrec.errors import DistRecError
from lightning_distrec.retrieval import (
    contrastive_loss,
    in_batch_loss,
    sampled_softmax_loss,
    softmax_loss,
    top_k,
)
from tests.support.ranks import (
    rank_and_num_ranks,
    run_each_on_ranks,
    run_on_warm_ranks,
)
from tests.support.retrieval_models import (
    DIM,
    ROWS,
    Batch,
    Retrieving,
    make_batch,
    seeded,
    strategy_of,
    train,
)


def _on(rank: int, bad: Any, good: Any) -> Any:
    return bad if rank_and_num_ranks()[0] == rank else good


def _softmax(model: Retrieving, queries: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return softmax_loss(queries, model.table, targets, **options)


def _sampled(model: Retrieving, queries: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return sampled_softmax_loss(
        queries, model.table, targets, **({"num_negatives": 3, "step": 0} | options)
    )


CALLS: dict[str, tuple[Any, str]] = {
    "target beyond": (
        lambda m, q, t: _softmax(m, q, t + _on(1, ROWS, 0)),
        f"IdsError: softmax_loss: rank 1: the target .* is no row of 'items', .* to {ROWS - 1}",
    ),
    "types": (
        lambda m, q, t: _softmax(m, q, t.to(_on(1, torch.float32, torch.int64))),
        "ConfigError: softmax_loss: rank 1: targets .* of torch.float32 must be int64",
    ),
    "widths": (
        lambda m, q, t: _softmax(m, q[:, : _on(1, 5, DIM)], t),
        "ConfigError: softmax_loss: rank 1: queries .*5.* must be floats, .*, 8",
    ),
    "numbers of targets": (
        lambda m, q, t: _softmax(m, q, t[: _on(0, 1, None)]),
        "ConfigError: softmax_loss: rank 0: targets .* one for each query",
    ),
    "bias": (
        lambda m, q, t: _softmax(m, q, t, bias=torch.zeros(_on(1, 3, ROWS))),
        "ConfigError: softmax_loss: rank 1: bias .*3.* must be .*37",
    ),
    "smoothing": (
        lambda m, q, t: _softmax(m, q, t, label_smoothing=_on(1, 2.0, 0.5)),
        "ConfigError: softmax_loss: rank 1: label_smoothing=2.0 must be in 0 to 1",
    ),
    "unequal smoothing": (
        lambda m, q, t: _softmax(m, q, t, label_smoothing=_on(1, 0.1, 0.2)),
        "ConfigError: softmax_loss: label_smoothing differs between ranks: 0.2, 0.1",
    ),
    "no table": (
        lambda m, q, t: softmax_loss(q, (m, "itm"), t),
        "ConfigError: softmax_loss: there is no table 'itm'",
    ),
    "no embedding": (
        lambda m, q, t: softmax_loss(q, m.tower, t),
        "ConfigError: softmax_loss: the table is a Linear. Pass an nn.Embedding",
    ),
    "sampler": (
        lambda m, q, t: _sampled(m, q, t, sampler="zipf"),
        "ConfigError: sampled_softmax_loss: rank 0: num_negatives=3 .* sampler='zipf' one of",
    ),
    "temperature": (
        lambda m, q, t: _softmax(m, q, t, temperature=_on(1, 0.0, 1.0)),
        "ConfigError: softmax_loss: rank 1: temperature=0.0 must be a number above 0",
    ),
    "temperature of each": (
        lambda m, q, t: _sampled(m, q, t, temperature=_on(0, torch.ones(4, 1), 1.0)),
        "ConfigError: sampled_softmax_loss: rank 0: temperature .4, 1. .*a tensor of one element",
    ),
    "type of exclude": (
        lambda m, q, t: top_k(q, m.table, 2, exclude=t[:, None].to(_on(1, torch.float32, t.dtype))),
        "ConfigError: top_k: rank 1: k=2 .* exclude .* integers",
    ),
    "temperatures": (
        lambda m, q, t: in_batch_loss(q, q, temperature=_on(0, 0.1, 0.2)),
        "ConfigError: in_batch_loss: temperature differs between ranks: 0.1, 0.2",
    ),
    "biases": (
        lambda m, q, t: _softmax(m, q, t, bias=torch.full((ROWS,), _on(1, 0.5, 0.0))),
        "ConfigError: softmax_loss: bias differs between ranks: values",
    ),
    "functions": (
        lambda m, q, t: _on(1, top_k(q, m.table, 1), 0) if _on(1, 1, 0) else _softmax(m, q, t),
        "ConfigError: .*: the function differs between ranks: softmax_loss, top_k",
    ),
    "k": (
        lambda m, q, t: top_k(q, m.table, _on(1, ROWS + 1, 2)),
        "ConfigError: top_k: rank 1: k=38 must be 1 to 37",
    ),
    "keys": (
        lambda m, q, t: in_batch_loss(q, q[:, : _on(1, 3, None)]),
        "ConfigError: in_batch_loss: rank 1: queries .* must be .queries, dim.",
    ),
    "labels": (
        lambda m, q, t: contrastive_loss(q, q, _on(1, t[:1], t)),
        "ConfigError: contrastive_loss: rank 1: queries .* labels",
    ),
}


def _messages() -> dict[str, str]:
    messages = {}

    def step(model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
        for name, (call, _) in CALLS.items():
            try:
                call(model, queries, batch["targets"])
            except DistRecError as error:
                messages[name] = f"{type(error).__name__}: {error}"
        # All ranks still agree about what comes next.
        dist.barrier()
        return softmax_loss(queries, model.table, batch["targets"])

    _fit(step, embedding_update="dense")
    return messages


def test_bad_input_is_one_error_on_all_ranks() -> None:
    first, second = (rank["messages"] for rank in run_each_on_ranks({"messages": (_messages,)}, 2))
    assert first == second
    for name, (_, pattern) in CALLS.items():
        assert name in first, f"{name} was not refused"
        pytest.raises(AssertionError, _raise, first[name]).match(pattern)


def _raise(message: str) -> None:
    raise AssertionError(message)


def _fit(loss: Any, num_steps: int = 1, **options: Any) -> None:
    strategy = strategy_of("embedding", "row_wise", find_unused_parameters=True) | options
    train(seeded("embedding", loss, "SGD"), [[make_batch(0, 4)] * 2] * num_steps, strategy)


SCORES: dict[str, tuple[Any, str]] = {
    "softmax": (lambda x, t: x.softmax(1), "softmax"),
    "a mask": (lambda x, t: x.masked_fill(x > 0, 0.0), "gt"),
    "some rows": (lambda x, t: x[:, 1:], "__getitem__"),
    "a bias of each query": (lambda x, t: x + t[:, None], "add"),
    "in place": (lambda x, t: x.div_(2.0), "div_"),
    "a transposed loss": (lambda x, t: functional.cross_entropy(x.T, t), "permute|T"),
    "weighted classes": (
        lambda x, t: functional.cross_entropy(x, t, weight=torch.ones(ROWS)),
        "cross_entropy",
    ),
    "worst rows": (lambda x, t: x.topk(2, largest=False), "topk"),
    "best queries": (lambda x, t: x.argmax(0), "argmax"),
    "all values": (lambda x, t: x.sum(), "sum"),
    "another's scores": (lambda x, t: torch.ones(4, ROWS) - x, "sub|rsub"),
    "a product of both": (lambda x, t: x * x, "mul"),
    "stacked scores": (lambda x, t: torch.stack([torch.ones(4, ROWS), x]), "stack"),
    "joined scores": (lambda x, t: torch.cat([x, torch.ones(4, 1)], 1), "cat"),
    "printed values": (lambda x, t: x.tolist(), "tolist"),
    "a gradient of the best": (lambda x, t: x.topk(2).values.sum().backward(), "the gradient"),
}


def _refusals() -> dict[str, str]:
    messages = {}

    def step(model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
        scores = queries @ model.items.weight.T
        assert scores.shape == (4, ROWS)
        assert scores.requires_grad
        assert len(scores) == 4
        for name, (call, _) in SCORES.items():
            try:
                call(scores, batch["targets"])
            except DistRecError as error:
                messages[name] = f"{type(error).__name__}: {error}"
        with torch.no_grad():
            assert not scores.detach().requires_grad
        return functional.cross_entropy(scores, batch["targets"])

    _fit(step, convert_embeddings=["items"])
    return messages


def test_what_needs_all_scores_is_refused_with_the_line_to_write() -> None:
    messages = run_on_warm_ranks(_refusals, 2)[0]
    for name, (_, operation) in SCORES.items():
        assert name in messages, f"{name} was not refused"
        pattern = (
            rf"ShardedWeightError: scores .*'items' were read \(({operation}).*"
            r"write softmax_loss\(queries, self.items, targets\).*gathered_weight"
        )
        pytest.raises(AssertionError, _raise, messages[name]).match(pattern)


def _changed() -> list[str]:
    messages = []
    logits = []

    def step(model: Retrieving, queries: Tensor, batch: Batch) -> Tensor:
        if logits:
            # Of the step before: the optimizer has stepped since.
            _note(messages, lambda: logits[0].argmax(1))
        weight = model.items.weight
        detached = queries.detach()
        scores = detached @ weight.T
        detached.mul_(2)
        _note(messages, lambda: scores.argmax(1))
        logits.append((queries @ weight.T).detach())
        return functional.cross_entropy(queries @ weight.T, batch["targets"])

    _fit(step, num_steps=2, convert_embeddings=["items"])
    return messages


def _note(messages: list[str], call: Callable[[], Any]) -> None:
    try:
        call()
    except DistRecError as error:
        messages.append(f"{type(error).__name__}: {error}")


def test_scores_whose_queries_or_rows_have_changed_since_are_refused() -> None:
    messages = run_on_warm_ranks(_changed, 2)[0]
    assert len(messages) == 3
    for message in messages:
        assert "ShardedWeightError: scores" in message
        assert "the weights have changed since the product" in message
