"""The queries of a call that have a target, after all arguments of a rank were found to fit."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_distrec.errors import ConfigError, IdsError
from lightning_distrec.ranks import number_for
from lightning_distrec.sharding.scores.rank_group import RankGroup, ranks_of
from lightning_distrec.sharding.scores.table_rows import TableRows

Reduction = Literal["mean", "sum", "none", "global_mean"]
REDUCTIONS = get_args(Reduction)
MAX_BYTES = 2**28


@dataclass(frozen=True)
class CountedQueries:
    """The queries whose target counts."""

    queries: Tensor
    """(counted, dim)."""
    targets: Tensor
    """(counted,), int64."""
    places: Tensor | None
    """(counted,), where each is among all queries; None: all count."""
    shape: torch.Size
    """Of all targets."""

    def spread(self, losses: Tensor) -> Tensor:
        """Return losses in the shape of all targets, 0 where none counts."""
        if self.places is not None:
            all_losses = losses.new_zeros(self.shape.numel())
            losses = all_losses.index_copy(0, self.places, losses)
        return losses.view(self.shape)


def count_queries(
    queries: Tensor, targets: Tensor, rows: TableRows, ignore_index: int | None
) -> CountedQueries:
    """Return the queries with a target that counts. Waits once for a GPU.

    ignore_index: None: all targets count. Raises ConfigError, IdsError: arguments do not fit.
    """
    refuse_queries(queries, rows)
    shape = queries.shape[:-1]
    is_integer = targets.dtype in (torch.int64, torch.int32)
    if not is_integer or targets.shape != shape:
        raise ConfigError(
            f"targets {tuple(targets.shape)} of {targets.dtype} must be int64 or int32, "
            f"{tuple(shape)}, one for each query."
        )
    ids = targets.reshape(-1).long()
    is_counted = torch.ones_like(ids, dtype=torch.bool)
    if ignore_index is not None:
        is_counted = ids != ignore_index
    is_row = (ids >= 0) & (ids < rows.num_rows)
    is_wrong = is_counted & ~is_row
    sums = torch.stack([is_counted.sum(), is_wrong.sum()])
    num_counted, num_wrong = sums.tolist()
    if num_wrong:
        first = int(ids[is_wrong][0])
        raise IdsError(
            f"the target {first} is no row of '{rows.name}', which has rows 0 to "
            f"{rows.num_rows - 1}."
        )
    queries = queries.reshape(-1, rows.dim)
    places = None
    if num_counted < len(ids):
        # What does not count is neither sent nor scored. A sort, for a mask is waited for.
        order = is_counted.byte().argsort(descending=True, stable=True)
        places = order[:num_counted]
        queries = queries[places]
        ids = ids[places]
    return CountedQueries(queries, ids, places, shape)


def refuse_queries(queries: Tensor, rows: TableRows) -> None:
    """Raise ConfigError: queries do not fit the rows."""
    if queries.shape[-1:] != (rows.dim,) or not queries.is_floating_point():
        raise ConfigError(
            f"queries {tuple(queries.shape)} of {queries.dtype} must be floats, (..., {rows.dim}), "
            f"as rows of '{rows.name}' are."
        )


def refuse_limit(max_bytes: int) -> None:
    """Raise ConfigError: no scores fit into this limit."""
    if max_bytes < 1:
        raise ConfigError(f"max_bytes={max_bytes} must be at least 1.")


def refuse_reduction(reduction: str) -> None:
    """Raise ConfigError: there is no such reduction."""
    if reduction not in REDUCTIONS:
        raise ConfigError(f"reduction={reduction!r} must be one of {REDUCTIONS}.")


def refuse_temperature(temperature: float | Tensor) -> None:
    """Raise ConfigError: scores cannot be divided by it."""
    subject = f"temperature={temperature}"
    if isinstance(temperature, Tensor):
        subject = f"temperature {tuple(temperature.shape)}"
        is_number = temperature.numel() == 1
    else:
        is_number = temperature > 0
    if not is_number:
        raise ConfigError(f"{subject} must be a number above 0, or a tensor of one element.")


def scalar_in_words(value: float | Tensor) -> Any:
    """Return what ranks compare of a number; the values of a tensor are not waited for."""
    return "a tensor" if isinstance(value, Tensor) else value


def bias_in_words(bias: Tensor | None, rows: TableRows) -> str:
    """Return what ranks compare of a bias, which each has of all rows."""
    if bias is None:
        return "none"
    if isinstance(bias, nn.Parameter) or rows.ranks.num_ranks == 1:
        return "given"
    # DDP keeps parameters alike. What was computed may be of this rank's batch.
    values = bias.detach().double()
    places = torch.arange(1, len(values) + 1, device=values.device)
    sums = torch.stack([values.sum(), (values * places).sum(), values.amax()])
    return f"values {number_for(sums.tolist())}"


def score_dtype(queries: Tensor, rows: TableRows) -> torch.dtype:
    """Return the type in which scores are multiplied: autocast's, or that of the tensors."""
    device = queries.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return torch.promote_types(queries.dtype, rows.weights[0].dtype)


def reduced(losses: Tensor, reduction: Reduction, counts: list[int], ranks: RankGroup) -> Tensor:
    """Collective for "global_mean". Return the sum or mean that is asked for of this rank's losses.

    counts: how many there are on each of the ranks.
    """
    divisor = 1.0
    if reduction == "global_mean":
        # Of all ranks of the run, also where each of them has the table, or a group.
        run = ranks_of(None)
        if run.num_ranks > ranks.num_ranks:
            own_count = (len(losses), 0)
            _, headers = run.agree("global_mean", {}, lambda: (None, own_count))
            counts = [count for count, _ in headers]
        divisor = sum(counts) / len(counts)
    elif reduction == "mean":
        # A rank without targets adds nothing to the others' mean. None at all are NaN, as in torch.
        divisor = max(len(losses), min(1, sum(counts)))
    return losses.sum() / divisor
