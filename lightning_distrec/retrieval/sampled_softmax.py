"""A softmax over sampled rows of a table, the same rows on every rank."""

import math
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchrec import EmbeddingCollection, KeyedJaggedTensor

from lightning_distrec.errors import ConfigError
from lightning_distrec.retrieval.full_softmax import (
    MAX_BYTES,
    Reduction,
    problem_of_call,
    reduced,
)
from lightning_distrec.retrieval.table_rows import Table, embedding_of, rows_of


class Sampler(Protocol):
    """Draws numbers of rows, with replacement."""

    def draw(self, num: int, num_rows: int, generator: torch.Generator) -> Tensor:
        """Return (num,) numbers of rows, int64, on the CPU."""

    def log_probabilities(self, ids: Tensor, num_rows: int) -> Tensor:
        """Return the logarithm of the probability of each row, in the shape of `ids`."""


class Uniform:
    """Draws all rows alike."""

    def draw(self, num: int, num_rows: int, generator: torch.Generator) -> Tensor:
        """Return (num,) numbers of rows."""
        return torch.randint(num_rows, (num,), generator=generator)

    def log_probabilities(self, ids: Tensor, num_rows: int) -> Tensor:
        """Return the logarithm of one share each."""
        return torch.full(ids.shape, -math.log(num_rows), device=ids.device)


class LogUniform:
    """Draws by Zipf's law, for rows that are sorted by frequency, the most frequent first."""

    def draw(self, num: int, num_rows: int, generator: torch.Generator) -> Tensor:
        """Return (num,) numbers of rows."""
        draws = torch.rand(num, dtype=torch.float64, generator=generator)
        ids = (draws * math.log(num_rows + 1)).exp().long() - 1
        return ids.clamp(0, num_rows - 1)

    def log_probabilities(self, ids: Tensor, num_rows: int) -> Tensor:
        """Return log(log((row + 2) / (row + 1)) / log(num_rows + 1))."""
        shares = (1 / (ids.double() + 1)).log1p() / math.log(num_rows + 1)
        return shares.log().float()


class ByFrequency:
    """Draws by counts of rows, (num_rows,), to the given power. The counts are the same on every
    rank."""

    def __init__(self, counts: Tensor, power: float = 1.0) -> None:
        weights = counts.double().cpu() ** power
        self._ends = weights.cumsum(0)
        self._logs = (weights / self._ends[-1]).log().float()

    def draw(self, num: int, num_rows: int, generator: torch.Generator) -> Tensor:
        """Return (num,) numbers of rows."""
        draws = torch.rand(num, dtype=torch.float64, generator=generator)
        ids = torch.searchsorted(self._ends, draws * self._ends[-1], right=True)
        return ids.clamp(max=num_rows - 1)

    def log_probabilities(self, ids: Tensor, num_rows: int) -> Tensor:
        """Return the logarithms of the rows' shares; -inf for rows that are never drawn."""
        self._logs = self._logs.to(ids.device)
        return self._logs[ids]


SAMPLERS: dict[str, Sampler] = {"uniform": Uniform(), "log_uniform": LogUniform()}


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
    batch, for example. sampler: by name, ByFrequency, or an object of your own.
    log_q: subtract the logarithm of how often a row is expected among the negatives; without it the
    loss is of another distribution than the full softmax. A negative that is the target is masked.
    reduction: as of `softmax_loss`. Raises on every rank: ConfigError, IdsError.
    """
    rows = rows_of("sampled_softmax_loss", table)
    is_counted = targets.reshape(-1) != ignore_index
    problem = problem_of_call(queries, rows, targets, is_counted, MAX_BYTES)
    if num_negatives < 1 or isinstance(sampler, str) and sampler not in SAMPLERS:
        problem = ConfigError(
            f"num_negatives={num_negatives} must be at least 1, and sampler={sampler!r} one of "
            f"{list(SAMPLERS)} or an object."
        )
    equal = {"step": step, "seed": seed, "num_negatives": num_negatives}
    ids = targets.reshape(-1)[is_counted].long()
    counts = rows.ranks.agree("sampled_softmax_loss", problem, equal, len(ids))
    source = SAMPLERS[sampler] if isinstance(sampler, str) else sampler
    # One number of both; neighbouring seeds give unrelated draws.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) % 2**63)
    negatives = source.draw(num_negatives, rows.num_rows, generator).to(ids.device)
    vectors = _looked_up(table, ids, negatives)
    wanted, others = vectors[: len(ids)], vectors[len(ids) :]
    counted = queries.reshape(-1, rows.dim)[is_counted]
    # Without targets no negatives were looked up.
    negative_scores = (counted @ others.T).view(len(ids), num_negatives)
    scores = torch.cat([(counted * wanted).sum(1, keepdim=True), negative_scores], 1)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) / temperature
    if log_q:
        expected = math.log(num_negatives)
        target_logs = source.log_probabilities(ids, rows.num_rows)[:, None] + expected
        negative_logs = source.log_probabilities(negatives, rows.num_rows) + expected
        scores = scores - torch.cat([target_logs, negative_logs.expand(len(ids), -1)], 1)
    is_hit = functional.pad(negatives == ids[:, None], (1, 0))
    scores = scores.masked_fill(is_hit, -torch.inf)
    losses = functional.cross_entropy(scores, torch.zeros_like(ids), reduction="none")
    if reduction == "none":
        zeros = losses.new_zeros(is_counted.shape)
        return zeros.masked_scatter(is_counted, losses).view(targets.shape)
    return reduced(losses, reduction, counts)


def _looked_up(table: Table, targets: Tensor, negatives: Tensor) -> Tensor:
    """Return the rows of targets, and then of negatives where there are targets."""
    if not isinstance(table, tuple):
        if not isinstance(table, nn.Embedding):
            raise ConfigError("sampled_softmax_loss: pass an nn.Embedding, or (collection, name).")
        return table(torch.cat([targets, negatives[: len(targets) * len(negatives)]]))  # type: ignore[no-any-return]
    collection: Any = table[0]
    embedding_of("sampled_softmax_loss", table)
    if not isinstance(collection, EmbeddingCollection):
        raise ConfigError(
            "sampled_softmax_loss looks up rows: the table must be an nn.Embedding or of an "
            "EmbeddingCollection."
        )
    configs = collection.embedding_configs()
    feature = next(config.feature_names[0] for config in configs if config.name == table[1])
    keys = list(dict.fromkeys(key for config in configs for key in config.feature_names))
    # One bag for each query, as in other lookups of the step: by their number losses are weighted.
    # The first bag has the negatives, too.
    bags = len(targets)
    ids = torch.cat([targets[:1], negatives, targets[1:]]) if bags else targets
    lengths = torch.zeros(len(keys), bags, dtype=torch.long, device=ids.device)
    lengths[keys.index(feature)] = 1
    lengths[keys.index(feature), :1] += len(negatives)
    vectors = collection(KeyedJaggedTensor(keys, ids, lengths=lengths.flatten()))[feature].values()
    first, middle, rest = vectors.tensor_split([min(1, bags), len(vectors) - max(bags - 1, 0)])
    return torch.cat([first, rest, middle])
