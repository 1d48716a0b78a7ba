"""Weights losses where ranks have batches of unequal size, so that gradients are those of the mean over all examples.

DDP averages the ranks' gradients, so that a rank with few examples counts as much as one with many: a mean of means. A
run on one device has one mean over all examples. Weighting each rank's loss by its share of them makes the two equal.
"""

from collections.abc import Callable
from typing import Literal

import torch

from lightning_distrec.ranks import Ranks

LossReduction = Literal["mean", "sum", "rank_mean"]


class LossWeight:
    """What this rank's loss is multiplied by before backward.

    reduction: what the module's loss is over its batch. "mean": weight ranks by their number of examples. "sum": the
    gradients are those of the sum over all ranks. "rank_mean": leave it to DDP, a mean of the ranks' means.
    notify: called once where batches are unequal, with what is done about it.
    """

    def __init__(self, reduction: LossReduction, ranks: Ranks, notify: Callable[[str], None]) -> None:
        self._reduction = reduction
        self._ranks = ranks
        self._notify = notify
        self._has_notified = False
        self._unequal: list[int] = []
        self._factor: float | None = None

    @property
    def counts_examples(self) -> bool:
        """Whether the ranks' numbers of examples matter."""
        return self._reduction == "mean" and self._ranks.num_ranks > 1

    def begin_step(self) -> None:
        """Forget the batch of the step before."""
        self._unequal = []
        self._factor = None

    def add_lookup(self, num_examples: int, smallest: int, largest: int) -> None:
        """Add the number of examples of a lookup: this rank's, and the minimum and maximum over ranks."""
        if smallest != largest:
            # All lookups of a step are compared: collections may be called with different numbers of examples.
            self._unequal.append(num_examples)
            self._factor = None

    def add_ids(self, num_ids: int, smallest: int, largest: int) -> None:
        """Note once where ranks look up unequal numbers of ids, from which those of examples do not follow."""
        if smallest != largest and not self._has_notified and torch.is_grad_enabled():
            self._has_notified = True
            self._notify(
                f"torchrec_sharded: ranks look up unequal numbers of ids ({smallest:,} to {largest:,}) in one step. If "
                "batches are of unequal size, gradients are the mean of the ranks' means, as under DDP. This is "
                "reported once: lookups of nn.Embedding do not show how many examples these are."
            )

    def factor(self) -> float:
        """Collective where batches are unequal, which all ranks know. Return what to multiply the loss by."""
        if self._reduction == "sum":
            # DDP divides by the number of ranks: times that number, gradients are sums.
            return float(self._ranks.num_ranks)
        if not self._unequal:
            return 1.0
        # Whether sizes are unequal came with the lookups' own exchange, so all ranks are here or none is.
        if self._factor is None:
            self._factor = self._share(self._ranks.all_gather(self._unequal)) * self._ranks.num_ranks
        return self._factor

    def _share(self, unequal: list[list[int]]) -> float:
        """Return this rank's share of the examples. unequal: by rank, the numbers of examples of a step's lookups."""
        lookups = list(zip(*unequal, strict=True))
        reference = lookups[0]
        # Lookups agree where all ranks' numbers have one proportion, for 1 and 20 candidates per example, for instance.
        agree = all(
            size * sum(reference) == reference_size * sum(sizes)
            for sizes in lookups
            for size, reference_size in zip(sizes, reference, strict=True)
        )
        if not self._has_notified:
            self._has_notified = True
            examples = ", ".join(str(sizes[0] if agree else sorted(set(sizes))) for sizes in unequal)
            self._notify(
                f"the ranks' batches have unequal numbers of examples ({examples}). Each rank's loss is weighted by "
                "its share, so that gradients are those of the mean over all examples. If your loss is a sum, or a "
                "mean over something else, set loss_reduction='sum' or 'rank_mean' (plain DDP). This is reported once."
                if agree
                else "the ranks' batches have unequal numbers of examples, and a step's lookups disagree about them "
                f"({examples}). Gradients are the mean of the ranks' means, as under plain DDP. Set "
                "loss_reduction='rank_mean' if that is meant, or weight the loss yourself. This is reported once."
            )
        return reference[self._ranks.rank] / sum(reference) if agree else 1.0 / self._ranks.num_ranks
