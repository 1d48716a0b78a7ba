"""The exact softmax over all rows of a table, of which each rank scores those that it has."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_distrec.errors import ConfigError, DistRecError, IdsError
from lightning_distrec.retrieval.rank_group import ranks_of, with_gradient
from lightning_distrec.retrieval.table_rows import Block, Table, TableRows, block_rows, rows_of
from lightning_distrec.sharding.weights.shard_access import without_guards, write_back

Reduction = Literal["mean", "sum", "none", "global_mean"]
REDUCTIONS = get_args(Reduction)
MAX_BYTES = 2**28


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
    The table moves in every row, which no update inside of backward does: set
    embedding_update="sparse" or "dense" for it.
    Raises on every rank: ConfigError, arguments do not fit; IdsError, a target is no row.
    """
    rows = rows_of("softmax_loss", table)
    is_counted = targets.reshape(-1) != ignore_index
    problem = problem_of_call(queries, rows, max_bytes, targets, is_counted)
    if problem is None and bias is not None and bias.shape != (rows.num_rows,):
        problem = ConfigError(f"bias {tuple(bias.shape)} must be ({rows.num_rows},), of each row.")
    if problem is None and not 0 <= label_smoothing <= 1:
        problem = ConfigError(f"label_smoothing={label_smoothing} must be in 0 to 1.")
    if problem is None:
        problem = problem_of_reduction(reduction)
    counted_queries = queries
    if problem is None:
        # What does not count is neither sent nor scored.
        counted_queries = (queries / temperature).reshape(-1, rows.dim)[is_counted]
    counted_targets = targets.reshape(-1)[is_counted]
    dtype = score_dtype(queries, rows)
    headers = rows.ranks.agree(
        "softmax_loss",
        problem,
        {
            "max_bytes": max_bytes,
            "label_smoothing": label_smoothing,
            "whether there is a bias": bias is not None,
            "dtype": dtype,
        },
        (len(counted_targets), counted_queries.requires_grad),
    )
    counts = [count for count, _ in headers]
    is_needed = torch.is_grad_enabled() and any(needed for _, needed in headers)
    scoring = _Scoring(rows, counts, dtype, label_smoothing, max_bytes)
    losses: Tensor = _SoftmaxLosses.apply(
        scoring, with_gradient(counted_queries, is_needed), counted_targets, bias, *rows.weights
    )
    return reduced(losses, reduction, counts, is_counted.view(targets.shape))


def problem_of_reduction(reduction: str) -> ConfigError | None:
    """Return what is wrong with a reduction."""
    if reduction in REDUCTIONS:
        return None
    return ConfigError(f"reduction={reduction!r} must be one of {REDUCTIONS}.")


def reduced(losses: Tensor, reduction: Reduction, counts: list[int], is_counted: Tensor) -> Tensor:
    """Collective for "global_mean". Return what is asked for of this rank's losses.

    counts: how many there are on each rank of the call. is_counted: which queries have one.
    """
    if reduction == "none":
        zeros = losses.new_zeros(is_counted.shape)
        return zeros.masked_scatter(is_counted, losses)
    divisor = 1.0
    if reduction == "global_mean":
        # Of all ranks, also where the table is on each of them.
        all_counts = ranks_of(None).agree("global_mean", None, {}, len(losses))
        divisor = sum(all_counts) / len(all_counts)
    elif reduction == "mean":
        # A rank without targets adds nothing to the others' mean. None at all are NaN, as in torch.
        divisor = max(len(losses), min(1, sum(counts)))
    return losses.sum() / divisor


def score_dtype(queries: Tensor, rows: TableRows) -> torch.dtype:
    """Return the type in which scores are multiplied: autocast's, or that of the tensors."""
    kind = queries.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return torch.promote_types(queries.dtype, rows.weights[0].dtype)


def problem_of_call(
    queries: Tensor, rows: TableRows, max_bytes: int, targets: Tensor | None, is_row: Tensor | None
) -> DistRecError | None:
    """Return what is wrong with arguments of this rank. is_row: (all targets,), where they are to
    be rows."""
    if queries.shape[-1:] != (rows.dim,) or not queries.is_floating_point() or max_bytes < 1:
        return ConfigError(
            f"queries {tuple(queries.shape)} of {queries.dtype} must be floats, (..., {rows.dim}), "
            f"as rows of '{rows.name}' are; max_bytes={max_bytes} must be at least 1."
        )
    if targets is None or is_row is None:
        return None
    shape = queries.shape[:-1]
    if targets.dtype not in (torch.int64, torch.int32) or targets.shape != shape:
        return ConfigError(
            f"targets {tuple(targets.shape)} of {targets.dtype} must be int64 or int32, "
            f"{tuple(shape)}, one for each query."
        )
    ids = targets.reshape(-1)
    wrong = ids[is_row & ((ids < 0) | (ids >= rows.num_rows))]
    if not len(wrong):
        return None
    return IdsError(
        f"the target {int(wrong[0])} is no row of '{rows.name}', which has rows 0 to "
        f"{rows.num_rows - 1}."
    )


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
        rows_per_block = block_rows(len(queries), self.rows.dim, self.sum_dtype, self.max_bytes)
        for block in self.rows.blocks(weights, rows_per_block):
            values = self.rows.read(block, weights).to(self.dtype)
            scores = (queries @ values.T).to(self.sum_dtype)
            if bias is not None:
                scores += bias[block.first : block.first + block.num_rows]
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
        rows = scoring.rows
        ranks = scoring.rows.ranks
        smoothing = scoring.label_smoothing
        with torch.autocast(queries.device.type, enabled=False):
            all_queries = ranks.gather_rows(queries.to(scoring.dtype), scoring.counts)
            all_targets = ranks.gather_rows(targets.long(), scoring.counts)
            sums = torch.zeros(2, len(all_targets), dtype=scoring.sum_dtype, device=queries.device)
            exponentials, target_scores = sums
            exponentials.fill_(-torch.inf)
            for block, _, scores in scoring.blocks(all_queries, bias, list(weights)):
                if not scores.numel():
                    continue
                is_here, columns = _columns(all_targets, block)
                block_scores = torch.where(is_here, scores.gather(1, columns)[:, 0], 0)
                target_scores += (1 - smoothing) * block_scores
                if smoothing:
                    target_scores += smoothing / rows.num_rows * scores.sum(1)
                exponentials.copy_(torch.logaddexp(exponentials, scores.logsumexp(1)))
            largest = ranks.all_reduce(exponentials.clone(), dist.ReduceOp.MAX)
            exponentials.sub_(largest).exp_()
            ranks.all_reduce(sums)
        log_sums = exponentials.log() + largest
        ctx.scoring = scoring
        ctx.save_for_backward(all_queries, all_targets, log_sums, bias, *weights)
        return (log_sums - target_scores).split(scoring.counts)[ranks.rank].clone()

    @staticmethod
    @once_differentiable
    @without_guards
    def backward(ctx: Any, gradient: Tensor) -> Any:
        write_back()
        scoring: _Scoring = ctx.scoring
        rows = scoring.rows
        ranks = scoring.rows.ranks
        all_queries, all_targets, log_sums, bias, *weights = ctx.saved_tensors
        _, needs_queries, _, needs_bias, *needs_weights = ctx.needs_input_grad
        factors = ranks.gather_rows(gradient.to(scoring.sum_dtype), scoring.counts)
        query_gradients = torch.zeros_like(all_queries, dtype=scoring.sum_dtype)
        bias_gradient = torch.zeros_like(bias) if needs_bias else None
        weight_gradients = list(map(torch.zeros_like, weights))
        for block, values, scores in scoring.blocks(all_queries, bias, weights):
            scores.sub_(log_sums[:, None]).exp_()
            _subtract_targets(scores, all_targets, block, scoring)
            scores *= factors[:, None]
            if bias_gradient is not None:
                # DDP averages it over the ranks, of which each has the part of its rows.
                bias_gradient[block.first : block.first + block.num_rows] = scores.sum(0)
            scores = scores.to(scoring.dtype)
            query_gradients += scores @ values
            if any(needs_weights):
                # The mean of the ranks' gradients, as lookups have it and DDP.
                row_gradients = (scores.T @ all_queries).div_(ranks.num_ranks)
                rows.write(block, row_gradients, weight_gradients)
        query_gradient = None
        if needs_queries:
            query_gradient = ranks.send_rows(query_gradients, scoring.counts).sum(0)
        learned = [
            values if needed else None
            for values, needed in zip(weight_gradients, needs_weights, strict=True)
        ]
        return None, query_gradient, None, bias_gradient, *learned


def _columns(targets: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Return which targets are in a block, (queries,), and their columns or 0, (queries, 1)."""
    is_here = (targets >= block.first) & (targets < block.first + block.num_rows)
    return is_here, torch.where(is_here, targets - block.first, 0)[:, None]


def _subtract_targets(
    probabilities: Tensor, targets: Tensor, block: Block, scoring: _Scoring
) -> None:
    """Subtract from a block's probabilities, in place, what the targets' distribution has."""
    if not probabilities.numel():
        return
    smoothing = scoring.label_smoothing
    probabilities -= smoothing / scoring.rows.num_rows
    is_here, columns = _columns(targets, block)
    shares = torch.where(is_here, smoothing - 1.0, 0.0).to(probabilities.dtype)
    probabilities.scatter_add_(1, columns, shares[:, None])
