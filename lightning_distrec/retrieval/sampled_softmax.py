"""A softmax over sampled rows of a table, the same rows on every rank."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchrec import EmbeddingCollection, KeyedJaggedTensor

from lightning_distrec import gpu
from lightning_distrec.errors import ConfigError
from lightning_distrec.sharding.scores.counted_queries import (
    CountedQueries,
    Reduction,
    count_queries,
    reduced,
    refuse_reduction,
    refuse_temperature,
    scalar_in_words,
)
from lightning_distrec.sharding.scores.rank_group import Numbers
from lightning_distrec.sharding.scores.table_rows import Table, rows_of


@dataclass(frozen=True)
class Sampler:
    """A distribution of rows, by how much of it lies before a row."""

    before: Callable[[Tensor], Tensor]
    """Takes numbers of rows as float64, the number of all of them included."""
    inverse: Callable[[Tensor], Tensor]
    """Takes what `before` returns, and returns the row that it falls into, rounded or not."""

    def draw(self, num: int, num_rows: int, generator: torch.Generator) -> Tensor:
        """Return (num,) numbers of rows, int64, drawn with replacement."""
        draws = torch.rand(num, dtype=torch.float64, generator=generator)
        values = draws * self._total(num_rows)
        ids = self.inverse(values).long()
        return ids.clamp(0, num_rows - 1)

    def log_probabilities(self, ids: Tensor, num_rows: int) -> Tensor:
        """Return the logarithm of the probability of each row, in the shape of `ids`."""
        rows = ids.double().cpu()
        counts = self.before(rows + 1) - self.before(rows)
        shares = counts / self._total(num_rows)
        return shares.log().float().to(ids.device)

    def _total(self, num_rows: int) -> Tensor:
        return self.before(torch.tensor(float(num_rows), dtype=torch.float64))


def by_frequency(counts: Tensor, power: float = 1.0) -> Sampler:
    """Return a sampler by counts of rows, (num_rows,), to the given power.

    The counts are the same on every rank. A row without a count is never drawn.
    Raises ConfigError: they are no counts.
    """
    shares = counts.double().cpu() ** power
    ends = functional.pad(shares.cumsum(0), (1, 0))
    if counts.ndim != 1 or bool((counts < 0).any()) or not 0 < float(ends[-1]) < math.inf:
        raise ConfigError(
            f"by_frequency: counts {tuple(counts.shape)} must be (num_rows,), none of them below 0 "
            "and some above."
        )
    return Sampler(
        before=lambda rows: ends[rows.long()],
        inverse=lambda values: torch.searchsorted(ends, values, right=True) - 1,
    )


SAMPLERS = {
    "uniform": Sampler(before=torch.clone, inverse=torch.clone),
    # Zipf's law, for rows that are sorted by frequency.
    "log_uniform": Sampler(before=torch.log1p, inverse=torch.expm1),
}


def sampled_softmax_loss(
    queries: Tensor,
    table: Table,
    targets: Tensor,
    *,
    num_negatives: int,
    step: int,
    sampler: Literal["uniform", "log_uniform"] | Sampler = "uniform",
    log_q: bool = True,
    seed: int = 0,
    temperature: float | Tensor = 1.0,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Tensor:
    """Collective where the table is sharded, and so is its backward. Return the cross entropy of
    each target among itself and `num_negatives` rows, which all queries of all ranks share.

    The rows are looked up as any ids are, so that every update of tables is possible.

    queries: (..., dim). table: an nn.Embedding, or an EmbeddingCollection and a table's name.
    targets: (...), numbers of rows; `ignore_index`: this query does not count.
    step: negatives are drawn from `seed` and it alone, the same on all ranks: the number of the
    batch, for example. sampler: "uniform", "log_uniform" for rows that are sorted by frequency, the
    most frequent first, or `by_frequency(counts)`.
    log_q: subtract from a negative's score the logarithm of how often it is expected, so that more
    negatives bring the loss closer to `softmax_loss`. A negative that is the target is masked.
    reduction: as of `softmax_loss`. Raises on every rank: ConfigError, IdsError.
    """
    rows = rows_of("sampled_softmax_loss", table)

    def prepare() -> tuple[CountedQueries, Numbers]:
        refuse_reduction(reduction)
        refuse_temperature(temperature)
        is_sampler = not isinstance(sampler, str) or sampler in SAMPLERS
        if num_negatives < 1 or not is_sampler:
            raise ConfigError(
                f"num_negatives={num_negatives} must be at least 1, and sampler={sampler!r} one of "
                f"{list(SAMPLERS)} or an object."
            )
        counted = count_queries(queries, targets, rows, ignore_index)
        return counted, (len(counted.targets), 0)

    equal = {
        "reduction": reduction,
        "temperature": scalar_in_words(temperature),
        "ignore_index": ignore_index,
        "step": step,
        "seed": seed,
        "num_negatives": num_negatives,
        "sampler": sampler if isinstance(sampler, str) else "an object",
        "log_q": log_q,
    }
    counted, headers = rows.ranks.agree("sampled_softmax_loss", equal, prepare)
    ids = counted.targets
    source = SAMPLERS[sampler] if isinstance(sampler, str) else sampler
    # One number of both; neighbouring seeds give unrelated draws.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    draws = source.draw(num_negatives, rows.num_rows, generator)
    negatives = gpu.on_device_of(ids, draws)
    vectors = _looked_up(table, ids, negatives)
    target_rows = vectors[: len(ids)]
    negative_rows = vectors[len(ids) :]
    target_scores = (counted.queries * target_rows).sum(1, keepdim=True)
    # Without targets no negatives were looked up.
    negative_scores = (counted.queries @ negative_rows.T).view(len(ids), num_negatives)
    scores = torch.cat([target_scores, negative_scores], 1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) / temperature
    if log_q:
        # How often each is expected among the negatives. The target is there once, not drawn.
        expected = source.log_probabilities(draws, rows.num_rows) + math.log(num_negatives)
        corrections = functional.pad(expected, (1, 0))
        scores = scores - gpu.on_device_of(scores, corrections)
    is_hit = functional.pad(negatives == ids[:, None], (1, 0))
    scores = scores.masked_fill(is_hit, -torch.inf)
    losses = functional.cross_entropy(scores, torch.zeros_like(ids), reduction="none")
    if reduction == "none":
        return counted.spread(losses)
    counts = [count for count, _ in headers]
    return reduced(losses, reduction, counts, rows.ranks)


def _looked_up(table: Table, targets: Tensor, negatives: Tensor) -> Tensor:
    """Return the rows of targets, and then of negatives where there are targets."""
    bags = len(targets)
    negatives = negatives[: bags * len(negatives)]
    if isinstance(table, nn.Embedding):
        return table(torch.cat([targets, negatives]))  # type: ignore[no-any-return]
    collection, name = table if isinstance(table, tuple) else (table, "")
    if not isinstance(collection, EmbeddingCollection):
        raise ConfigError(
            "sampled_softmax_loss looks up rows: pass an nn.Embedding, or an EmbeddingCollection "
            "and the name of its table."
        )
    keys: list[str] = []
    feature = ""
    for config in collection.embedding_configs():
        keys += [key for key in config.feature_names if key not in keys]
        if config.name == name:
            feature = config.feature_names[0]
    # One bag for each query, as in other lookups of the step: by their number losses are weighted.
    # The last bag has the negatives, too.
    lengths = torch.zeros(len(keys), bags, dtype=torch.long, device=targets.device)
    lengths_of_feature = lengths[keys.index(feature)]
    lengths_of_feature.fill_(1)
    lengths_of_feature[-1:] += len(negatives)
    ids = torch.cat([targets, negatives])
    features = KeyedJaggedTensor(keys, ids, lengths=lengths.flatten())
    looked_up = collection(features)
    return looked_up[feature].values()  # type: ignore[no-any-return]
