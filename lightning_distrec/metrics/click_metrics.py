"""Metrics of predictions and labels over all ranks: calibration, normalized entropy, and AUC, also
within users."""

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from lightning_distrec.errors import ConfigError, DataError
from lightning_distrec.option_values import check_choice


def flat_examples(
    metric: object, preds: Tensor, labels: Tensor, *columns: Tensor | None
) -> list[Tensor]:
    """Return predictions, labels and what else there is of each example, (examples,) each; None
    gives ones.

    Raises ConfigError: shapes differ, or predictions are no floating point numbers.
    """
    tensors = [
        preds,
        labels,
        *(torch.ones_like(preds) if other is None else other for other in columns),
    ]
    if any(tensor.shape != preds.shape for tensor in tensors) or not preds.is_floating_point():
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ConfigError(
            f"{type(metric).__name__}: predictions of {preds.dtype}, labels and the rest have "
            f"shapes {shapes}. They need the same shape, and predictions are floating point "
            "numbers."
        )
    return [tensor.detach().reshape(-1) for tensor in tensors]


def sum_over_ranks(state: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Collective. Return the sum of a state, for torchmetrics' dist_sync_fn: it would gather every
    rank's copy."""
    total = state.detach().clone()
    dist.all_reduce(total, group=group)
    return [total]


LOG_ODDS = 16.0
"""Bins divide log-odds from minus this to this evenly; what is beyond is in the outermost bins.
exp(-16) is 1e-7."""


def pairs_by_group(groups: Tensor, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return of each group: its pairs in order, all of its pairs of a positive and a negative, and
    its examples.

    groups, scores, labels: (examples,); any integers, any numbers, 0 or 1.
    Returns (examples,) each, float64, filled from the front; 0 where there are no more groups.
    Pairs in order are NaN where a score is NaN.
    """
    order = torch.argsort(scores, stable=True)
    order = order[torch.argsort(groups[order], stable=True)]
    groups = groups[order]
    scores = scores[order]
    positive = labels[order].double()
    negative = 1 - positive
    group = _changes(groups).cumsum(0) - 1
    run = (_changes(groups) | _changes(scores)).cumsum(0) - 1  # equal scores of one group

    def sums(values: Tensor, places: Tensor) -> Tensor:
        return torch.zeros_like(values).index_add_(0, places, values)

    run_negatives = sums(negative, run)
    negatives = sums(negative, group)
    before_run = running_sums(run_negatives) - run_negatives
    before_group = running_sums(negatives) - negatives
    below = before_run[run] - before_group[group] + run_negatives[run] / 2
    pairs = torch.where(scores.isnan(), torch.nan, positive * below)
    in_order = sums(pairs, group)
    positives = sums(positive, group)
    return in_order, positives * negatives, positives + negatives


def pairs_of_bins(counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return pairs in order, all pairs, and half of the pairs that share a bin, which may be in
    order or not.

    counts: (..., bins, 2), negative and positive examples. Returns (...) each, float64.
    """
    negative, positive = counts.double().unbind(-1)
    unsure = (positive * negative).sum(-1) / 2
    below = (positive * (running_sums(negative) - negative)).sum(-1)
    return below + unsure, negative.sum(-1) * positive.sum(-1), unsure


def running_sums(values: Tensor) -> Tensor:
    """Return `values.cumsum(-1)`; on the host where it must be deterministic, which CUDA's sum of
    floats is not."""
    if torch.are_deterministic_algorithms_enabled():
        return values.cpu().cumsum(-1).to(values.device)
    return values.cumsum(-1)


def bins_of(preds: Tensor, bins: int, from_logits: bool) -> Tensor:
    """Return the bin of each prediction, from 0; bins divide log-odds evenly. A NaN is in some
    bin."""
    log_odds = preds.double() if from_logits else torch.logit(preds.double(), eps=1e-9)
    places = ((log_odds + LOG_ODDS) * (bins / (2 * LOG_ODDS))).nan_to_num(0.0)
    return places.clamp(0, bins - 1).long()


def _changes(values: Tensor) -> Tensor:
    """Return where a value differs from the one before; True at the first."""
    return functional.pad(values[1:] != values[:-1], (1, 0), value=True)[: len(values)]


class RatioMetric(Metric):
    """A quotient of sums over examples: float64 numbers by name, which ranks add up."""

    full_state_update = False
    is_differentiable = False
    sums: tuple[str, ...] = ()

    def __init__(self, from_logits: bool = False, **options: Any) -> None:
        super().__init__(**{"dist_sync_fn": sum_over_ranks, **options})
        self.from_logits = from_logits
        for name in self.sums:
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")


class Calibration(RatioMetric):
    """Sum of predictions divided by the sum of labels: above 1, the model predicts too much.

    `update(preds, labels, weights=None)`: probabilities, or log-odds with from_logits. NaN where no
    label is positive (torchrec.metrics.calibration gives 0 there). Two float64 numbers of memory.
    """

    higher_is_better = None
    sums = ("predicted", "observed")
    predicted: Tensor
    observed: Tensor

    @override
    def update(self, preds: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        preds, labels, weights = (
            values.double() for values in flat_examples(self, preds, labels, weights)
        )
        self.predicted = (
            self.predicted + (weights * (preds.sigmoid() if self.from_logits else preds)).sum()
        )
        self.observed = self.observed + (weights * labels).sum()

    @override
    def compute(self) -> Tensor:
        """Return the ratio, float32."""
        return torch.where(self.observed > 0, self.predicted / self.observed, torch.nan).float()


MIN_PROBABILITY = 1e-12
"""Predictions are kept this far from 0 and 1, as torchrec.metrics keeps them."""


class NormalizedEntropy(RatioMetric):
    """Log loss divided by the entropy of the mean label: 1 for the best constant prediction,
    smaller is better.

    `update(preds, labels, weights=None)`: probabilities, or log-odds with from_logits; labels from
    0 to 1.
    NaN where all labels are the same. Four float64 numbers of memory.
    Source: He et al. 2014, Practical Lessons from Predicting Clicks on Ads at Facebook;
    torchrec.metrics.ne.
    """

    higher_is_better = False
    sums = ("log_loss", "positives", "weights")
    log_loss: Tensor
    positives: Tensor
    weights: Tensor

    @override
    def update(self, preds: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        preds, labels, weights = (
            values.double() for values in flat_examples(self, preds, labels, weights)
        )
        if self.from_logits:
            losses = functional.binary_cross_entropy_with_logits(
                preds, labels, weights, reduction="none"
            )
        else:
            clamped = preds.clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY)
            losses = -weights * (labels * clamped.log() + (1 - labels) * (1 - clamped).log())
        self.log_loss = self.log_loss + losses.sum()
        self.positives = self.positives + (weights * labels).sum()
        self.weights = self.weights + weights.sum()

    @override
    def compute(self) -> Tensor:
        """Return the ratio, float32."""
        mean = self.positives / self.weights
        entropy = -(torch.special.xlogy(mean, mean) + torch.special.xlogy(1 - mean, 1 - mean))
        return torch.where(entropy > 0, self.log_loss / self.weights / entropy, torch.nan).float()


class DecayedAUC(Metric):
    """AUC of all examples, each weighted by 0.5 ** (updates since it came / half_life).

    `update(preds, labels)`: probabilities, or log-odds with from_logits; labels 0 or 1. Scores are
    counted in bins of equal width in log-odds, from -16 to 16, two float64 numbers each;
    `error_bound()` gives the largest difference that they cause. NaN without both labels. Over
    ranks it is that of one process whose batches are those of all ranks.
    """

    full_state_update = True  # forward would add states otherwise, without decay
    higher_is_better = True
    is_differentiable = False

    def __init__(
        self, half_life: float = 100.0, bins: int = 2000, from_logits: bool = False, **options: Any
    ) -> None:
        super().__init__(**{"dist_sync_fn": sum_over_ranks, **options})
        if half_life <= 0 or bins < 1:
            raise ConfigError(
                f"DecayedAUC: half_life={half_life} must be above 0, and bins={bins} at least 1."
            )
        self.half_life = half_life
        self.bins = bins
        self.from_logits = from_logits
        # A MetricCollection would share counts of different half lives, which are equal after the
        # first batch.
        self._counts = re.sub(r"\W", "_", f"counts_of_{half_life}_{from_logits}")
        self.add_state(
            self._counts, torch.zeros(2 * bins, dtype=torch.float64), dist_reduce_fx="sum"
        )

    @override
    def update(self, preds: Tensor, labels: Tensor) -> None:
        preds, labels = flat_examples(self, preds, labels)
        places = 2 * bins_of(preds, self.bins, self.from_logits) + (labels > 0.5)
        # A NaN makes all counts NaN, and with them the result.
        weights = torch.where(preds.isnan(), torch.nan, 1.0).double()
        decayed = getattr(self, self._counts) * 0.5 ** (1 / self.half_life)
        setattr(self, self._counts, decayed.index_add(0, places, weights))

    @override
    def compute(self) -> Tensor:
        """Return the share of pairs in order, float32."""
        in_order, pairs, _ = pairs_of_bins(getattr(self, self._counts).view(-1, 2))
        return (in_order / pairs).float()

    def error_bound(self) -> Tensor:
        """Collective. Return the largest difference to the value of the scores themselves, which
        bins have caused."""
        with self.sync_context(should_sync=self.sync_on_compute):
            _, pairs, unsure = pairs_of_bins(getattr(self, self._counts).view(-1, 2))
            return (unsure / pairs).float()


EMPTY = -1


class WindowedAUC(Metric):
    """AUC of the latest `window` examples of each rank, all of them together; exact, equal scores
    count half.

    `update(preds, labels)`: any scores, and labels 0 or 1. NaN without both labels. 5 bytes for
    each example of the window; `compute` gathers those of all ranks on each rank.
    """

    full_state_update = True  # Lightning's and torchmetrics' forward would join windows otherwise
    higher_is_better = True
    is_differentiable = False
    preds: Tensor
    labels: Tensor
    seen: Tensor

    def __init__(self, window: int = 100_000, **options: Any) -> None:
        super().__init__(**options)
        if window < 1:
            raise ConfigError(f"WindowedAUC: window={window} must be at least 1.")
        self.window = window
        self.add_state("preds", torch.zeros(window), dist_reduce_fx="cat")
        self.add_state(
            "labels", torch.full((window,), EMPTY, dtype=torch.int8), dist_reduce_fx="cat"
        )
        # Not a number of the host: torchmetrics puts states back after a batch's own value.
        self.add_state("seen", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    @override
    def update(self, preds: Tensor, labels: Tensor) -> None:
        preds, labels = flat_examples(self, preds, labels)
        preds = preds[-self.window :]
        labels = labels[-self.window :]
        numbers = self.seen + torch.arange(len(preds), device=preds.device)
        places = numbers % self.window
        is_positive = (labels > 0.5).to(torch.int8)
        self.preds = self.preds.index_copy(0, places, preds.to(self.preds.dtype))
        self.labels = self.labels.index_copy(0, places, is_positive)
        self.seen = self.seen + len(preds)

    @override
    def compute(self) -> Tensor:
        """Return the share of pairs in order, float32."""
        # a row for each rank, where they are joined
        preds = self.preds.flatten()
        labels = self.labels.flatten()
        filled = labels != EMPTY
        # What is empty is a group of its own.
        in_order, pairs, _ = pairs_by_group((~filled).long(), preds, labels.clamp_min(0))
        return torch.where(filled.any(), in_order[0] / pairs[0], torch.nan).float()


DTYPES = {"preds": torch.float32, "labels": torch.bool, "users": torch.int64}


class GAUC(Metric):
    """Mean over users of the AUC of their examples, wherever these are; users without both labels
    do not count.

    `update(preds, labels, users)`: scores, labels 0 or 1, and integers that name users. A user's
    examples may be on several ranks and in several batches. Equal scores count half. NaN without
    any user that counts.

    Exact by default: every example is kept, 13 bytes each, and `compute` gathers those of all ranks
    on each rank. With `bins` and `num_users`, examples are counted in num_users x bins x 2 numbers
    of 4 bytes; `error_bound()` gives the largest difference to the exact value.

    Args:
        bins: counts examples in bins of equal width in log-odds, from -16 to 16; None: exact.
        num_users: with bins: users are named 0 to num_users - 1.
        from_logits: with bins: predictions are log-odds, else probabilities.
        weighting: "examples": each user counts by its number of examples; "users": all count alike.
    """

    full_state_update = False
    higher_is_better = True
    is_differentiable = False
    preds: list[Tensor]
    labels: list[Tensor]
    users: list[Tensor]
    counts: Tensor
    beyond: Tensor

    def __init__(
        self,
        bins: int | None = None,
        num_users: int | None = None,
        from_logits: bool = False,
        weighting: str = "examples",
        **options: Any,
    ) -> None:
        if (bins is None) != (num_users is None) or min(bins or 1, num_users or 1) < 1:
            raise ConfigError(
                f"GAUC: bins={bins}, num_users={num_users}: set both, at least 1, or neither "
                "(exact)."
            )
        check_choice("GAUC: weighting", weighting, ("examples", "users"))
        super().__init__(**({"dist_sync_fn": sum_over_ranks, **options} if bins else options))
        self.bins = bins
        self.num_users = num_users
        self.from_logits = from_logits
        self.weighting = weighting
        if bins and num_users:
            counts = torch.zeros(num_users * bins * 2, dtype=torch.int32)
            self.add_state("counts", counts, dist_reduce_fx="sum")
            self.add_state("beyond", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        else:
            for name in DTYPES:
                self.add_state(name, [], dist_reduce_fx="cat")

    @override
    def update(self, preds: Tensor, labels: Tensor, users: Tensor) -> None:
        preds, labels, users = flat_examples(self, preds, labels, users)
        if not self.bins or not self.num_users:
            for name, values in zip(DTYPES, (preds, labels, users), strict=True):
                getattr(self, name).append(values.to(DTYPES[name]))
            return
        # No branch on the values: what does not count is added as 0 at the first place, and the
        # host waits for no GPU.
        is_counted = (users >= 0) & (users < self.num_users) & ~preds.isnan()
        bins = users.long() * self.bins + bins_of(preds, self.bins, self.from_logits)
        places = torch.where(is_counted, bins * 2, 0)
        is_positive = (labels > 0.5).long() * is_counted
        self.counts = self.counts.index_add(0, places + is_positive, is_counted.int())
        self.beyond = self.beyond + (~is_counted).sum()

    @override
    def sync(self, *args: Any, **options: Any) -> None:
        """Collective. Join the ranks' states, as torchmetrics does."""
        # A rank without examples would send an empty tensor of another type, which others cannot
        # receive.
        if not self.bins:
            for name, dtype in DTYPES.items():
                if not getattr(self, name):
                    setattr(self, name, [torch.empty(0, dtype=dtype, device=self.device)])
        super().sync(*args, **options)

    @override
    def compute(self) -> Tensor:
        """Return the mean, float32. Raises DataError on every rank: with num_users, a user beyond
        it, or a NaN."""
        return self._means()[0]

    def error_bound(self) -> Tensor:
        """Collective. Return the largest difference of `compute` to the exact value, which bins
        have caused."""
        with self.sync_context(should_sync=self.sync_on_compute):
            return self._means()[1]

    def _means(self) -> tuple[Tensor, Tensor]:
        if self.bins and self.num_users:
            beyond = int(self.beyond)
            if beyond:
                raise DataError(
                    f"GAUC: {beyond} examples have a user that is not in 0 to "
                    f"{self.num_users - 1}, or a prediction that is NaN. Set num_users to the "
                    "number of users, and number them from 0."
                )
            counts = self.counts.view(self.num_users, self.bins, 2)
            in_order, pairs, unsure = pairs_of_bins(counts)
            sizes = counts.sum((1, 2)).double()
        else:
            examples = (dim_zero_cat(getattr(self, name)) for name in ("users", "preds", "labels"))
            in_order, pairs, sizes = pairs_by_group(*examples)
            unsure = torch.zeros_like(pairs)
        counted = pairs > 0
        weights = torch.where(counted, sizes if self.weighting == "examples" else 1.0, 0)
        shares = [torch.where(counted, numerator / pairs, 0) for numerator in (in_order, unsure)]
        mean, bound = ((share * weights).sum() / weights.sum() for share in shares)
        return mean.float(), bound.float()
