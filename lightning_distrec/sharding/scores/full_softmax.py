"""The exact softmax over all rows of a table, of which each rank scores those that it has."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_distrec.errors import ConfigError
from lightning_distrec.sharding.scores.counted_queries import (
    MAX_BYTES,
    CountedQueries,
    Reduction,
    bias_in_words,
    count_queries,
    reduced,
    refuse_limit,
    refuse_reduction,
    refuse_temperature,
    scalar_in_words,
    score_dtype,
)
from lightning_distrec.sharding.scores.rank_group import Numbers, with_gradient
from lightning_distrec.sharding.scores.table_rows import (
    Block,
    Table,
    TableRows,
    block_rows,
    rows_of,
)
from lightning_distrec.sharding.weights.shard_access import (
    without_guard,
    without_guards,
    write_back,
)


def softmax_loss(
    queries: Tensor,
    table: Table,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    max_bytes: int = MAX_BYTES,
) -> Tensor:
    """Collective where the table is sharded, and so is its backward. Return the cross entropy over
    all rows of a table: `F.cross_entropy(queries @ weight.T / temperature + bias, targets)`.

    No rank gathers the table. Each scores the queries of all ranks against its own rows, block by
    block, and scores them again in backward. Queries, and a few numbers for each, are exchanged.

    queries: (..., dim). table: an nn.Embedding, or a collection and a table's name, sharded or not.
    targets: (...), numbers of rows; `ignore_index`: this query does not count.
    bias: (num_rows,), the same on every rank. temperature: a number, or a tensor of one element.
    reduction: "mean" of this rank's queries, "sum", "none" (the shape of targets), or
        "global_mean", this rank's part of the mean over all ranks' queries, for unequal numbers of
        targets where the strategy does not weight losses (loss_reduction="rank_mean").
    max_bytes: bound of the memory for scores; smaller blocks of rows take more time.
    Returns float32, or float64 for such input. Where this rank alone has no targets the mean is 0.
    The table moves in every row: a first step that calls this lets the optimizer step on it, in
    place of an update inside of backward.
    Raises on every rank: ConfigError, arguments do not fit; IdsError, a target is no row.
    """
    return softmax_over(
        rows_of("softmax_loss", table),
        queries,
        targets,
        temperature=temperature,
        bias=bias,
        label_smoothing=label_smoothing,
        ignore_index=ignore_index,
        reduction=reduction,
        max_bytes=max_bytes,
    )


def softmax_over(
    rows: TableRows,
    queries: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    label_smoothing: float = 0.0,
    ignore_index: int | None = -100,
    reduction: Reduction = "mean",
    max_bytes: int = MAX_BYTES,
) -> Tensor:
    """Collective. Return `softmax_loss` over these rows. ignore_index: None: all targets count."""

    def prepare() -> tuple[CountedQueries, Numbers]:
        refuse_limit(max_bytes)
        refuse_reduction(reduction)
        refuse_temperature(temperature)
        if bias is not None and bias.shape != (rows.num_rows,):
            shape = tuple(bias.shape)
            raise ConfigError(f"bias {shape} must be ({rows.num_rows},), of each row.")
        if not 0 <= label_smoothing <= 1:
            raise ConfigError(f"label_smoothing={label_smoothing} must be in 0 to 1.")
        counted = count_queries(queries / temperature, targets, rows, ignore_index)
        return counted, (len(counted.targets), counted.queries.requires_grad)

    dtype = score_dtype(queries, rows)
    equal = {
        "reduction": reduction,
        "temperature": scalar_in_words(temperature),
        "label_smoothing": label_smoothing,
        "ignore_index": ignore_index,
        "max_bytes": max_bytes,
        "dtype": dtype,
        "bias": bias_in_words(bias, rows),
    }
    counted, headers = rows.ranks.agree("softmax_loss", equal, prepare)
    counts = [count for count, _ in headers]
    needs_gradient = any(needed for _, needed in headers)
    rows.before_gradient()
    scoring = _Scoring(rows, counts, dtype, label_smoothing, max_bytes)
    own_queries = with_gradient(counted.queries, torch.is_grad_enabled() and needs_gradient)
    losses: Tensor = _SoftmaxLosses.apply(
        scoring, own_queries, counted.targets, bias, *rows.weights
    )
    if reduction == "none":
        return counted.spread(losses)
    return reduced(losses, reduction, counts, rows.ranks)


@dataclass(frozen=True)
class _Scoring:
    """How all ranks' queries are scored against a table."""

    rows: TableRows
    counts: list[int]
    """How many queries each rank has."""
    dtype: torch.dtype
    """Of the factors of scores; sums are float32 or float64."""
    label_smoothing: float
    max_bytes: int

    @property
    def sum_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def blocks(
        self, queries: Tensor, bias: Tensor | None, weights: list[Tensor]
    ) -> Iterator[tuple[Block, Tensor, Tensor]]:
        """Yield each block, its rows, and the scores of all queries, in memory of their own."""
        rows = self.rows
        rows_per_block = block_rows(len(queries), rows.dim, self.sum_dtype, self.max_bytes)
        for block in rows.blocks(weights, rows_per_block):
            values = rows.read(block, weights)
            values = values.to(self.dtype)
            scores = queries @ values.T
            scores = scores.to(self.sum_dtype)
            if bias is not None:
                scores += bias[block.rows]
            yield block, values, scores


class _SoftmaxLosses(torch.autograd.Function):
    """Returns the losses of this rank's queries, (queries,)."""

    @staticmethod
    @without_guards
    def forward(
        ctx: Any,
        scoring: _Scoring,
        queries: Tensor,
        targets: Tensor,
        bias: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        write_back()
        ranks = scoring.rows.ranks
        smoothing = scoring.label_smoothing
        with torch.autocast(queries.device.type, enabled=False):
            all_queries = ranks.gather_rows(queries.to(scoring.dtype), scoring.counts)
            all_targets = ranks.gather_rows(targets, scoring.counts)
            # Few, and of many blocks and ranks: in float64 their order hardly matters.
            sums = all_queries.new_zeros(2, len(all_targets), dtype=torch.float64)
            exponentials, target_scores = sums
            exponentials.fill_(-torch.inf)
            for block, _, scores in scoring.blocks(all_queries, bias, list(weights)):
                if not scores.numel():
                    continue
                is_here, columns = block.columns(all_targets)
                block_scores = scores.gather(1, columns[:, None]).squeeze(1)
                block_scores = block_scores.where(is_here, 0)
                target_scores.add_(block_scores, alpha=1 - smoothing)
                if smoothing:
                    target_scores.add_(scores.sum(1), alpha=smoothing / scoring.rows.num_rows)
                exponentials.copy_(exponentials.logaddexp(scores.logsumexp(1)))
            largest = ranks.all_reduce(exponentials.clone(), dist.ReduceOp.MAX)
            exponentials.sub_(largest).exp_()
            ranks.all_reduce(sums)
        log_sums = exponentials.log() + largest
        losses = (log_sums - target_scores).to(scoring.sum_dtype)
        log_sums = log_sums.to(scoring.sum_dtype)
        ctx.scoring = scoring
        ctx.save_for_backward(all_queries, all_targets, log_sums, bias, *weights)
        return losses.split(scoring.counts)[ranks.rank].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # Checkpointing computes the user's code again to have them: that sees guards.
        saved = ctx.saved_tensors
        with without_guard():
            return _SoftmaxLosses.gradients(ctx, gradient, *saved)

    @staticmethod
    def gradients(
        ctx: Any,
        gradient: Tensor,
        all_queries: Tensor,
        all_targets: Tensor,
        log_sums: Tensor,
        bias: Any,
        *weights: Tensor,
    ) -> Any:
        """Collective. Return what backward returns."""
        write_back()
        scoring: _Scoring = ctx.scoring
        rows = scoring.rows
        ranks = scoring.rows.ranks
        _, needs_queries, _, needs_bias, *needs_weights = ctx.needs_input_grad
        factors = ranks.gather_rows(gradient.to(scoring.sum_dtype), scoring.counts)
        query_gradients = torch.zeros_like(all_queries, dtype=scoring.sum_dtype)
        bias_gradient = torch.zeros_like(bias) if needs_bias else None
        weight_gradients: list[Any] = [None] * len(weights)
        if any(needs_weights):
            weight_gradients = list(map(torch.zeros_like, weights))
        for block, values, scores in scoring.blocks(all_queries, bias, list(weights)):
            scores.sub_(log_sums[:, None]).exp_()
            _subtract_targets(scores, all_targets, block, scoring)
            scores *= factors[:, None]
            if bias_gradient is not None:
                # DDP averages it over the ranks, of which each has the part of its rows.
                bias_gradient[block.rows] = scores.sum(0)
            scores = scores.to(scoring.dtype)
            query_gradients += scores @ values
            if any(needs_weights):
                # The mean of the ranks' gradients, as lookups have it and DDP.
                row_gradients = (scores.T @ all_queries).div_(ranks.num_ranks)
                rows.write(block, row_gradients, weight_gradients)
        query_gradient = None
        if needs_queries:
            query_gradient = ranks.send_rows(query_gradients, scoring.counts).sum(0)
        return None, query_gradient, None, bias_gradient, *weight_gradients


def _subtract_targets(
    probabilities: Tensor, targets: Tensor, block: Block, scoring: _Scoring
) -> None:
    """Subtract from a block's probabilities, in place, what the targets' distribution has."""
    if not probabilities.numel():
        return
    smoothing = scoring.label_smoothing
    probabilities -= smoothing / scoring.rows.num_rows
    is_here, columns = block.columns(targets)
    shares = is_here.to(probabilities.dtype) * (smoothing - 1.0)
    probabilities.scatter_add_(1, columns[:, None], shares[:, None])
