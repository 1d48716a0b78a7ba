"""AUC within each user's examples."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from typing_extensions import override

from lightning_distrec.errors import ConfigError, DataError
from lightning_distrec.metrics.click_metrics import (
    bins_of,
    flat_examples,
    pairs_by_group,
    pairs_of_bins,
    sum_over_ranks,
)
from lightning_distrec.option_values import check_choice

DTYPES = {"preds": torch.float32, "labels": torch.bool, "users": torch.int64}


class GAUC(Metric):
    """Mean over users of the AUC of their examples, wherever these are; users without both labels do not count.

    `update(preds, labels, users)`: scores, labels 0 or 1, and integers that name users. A user's examples may be on
    several ranks and in several batches. Equal scores count half. NaN without any user that counts.

    Exact by default: every example is kept, 13 bytes each, and `compute` gathers those of all ranks on each rank. With
    `bins` and `num_users`, examples are counted in num_users x bins x 2 numbers of 4 bytes; `error_bound()` gives the
    largest difference to the exact value.

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
            raise ConfigError(f"GAUC: bins={bins}, num_users={num_users}: set both, at least 1, or neither (exact).")
        check_choice("GAUC: weighting", weighting, ("examples", "users"))
        super().__init__(**({"dist_sync_fn": sum_over_ranks, **options} if bins else options))
        self.bins, self.num_users, self.from_logits, self.weighting = bins, num_users, from_logits, weighting
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
        # No branch on the values: what does not count is added as 0 at the first place, and the host waits for no GPU.
        is_counted = (users >= 0) & (users < self.num_users) & ~preds.isnan()
        bins = users.long() * self.bins + bins_of(preds, self.bins, self.from_logits)
        places = torch.where(is_counted, bins * 2, 0)
        self.counts = self.counts.index_add(0, places + (labels > 0.5).long() * is_counted, is_counted.int())
        self.beyond = self.beyond + (~is_counted).sum()

    @override
    def sync(self, *args: Any, **options: Any) -> None:
        """Collective. Join the ranks' states, as torchmetrics does."""
        # A rank without examples would send an empty tensor of another type, which others cannot receive.
        if not self.bins:
            for name, dtype in DTYPES.items():
                if not getattr(self, name):
                    setattr(self, name, [torch.empty(0, dtype=dtype, device=self.device)])
        super().sync(*args, **options)

    @override
    def compute(self) -> Tensor:
        """Return the mean, float32. Raises DataError on every rank: with num_users, a user beyond it, or a NaN."""
        return self._means()[0]

    def error_bound(self) -> Tensor:
        """Collective. Return the largest difference of `compute` to the exact value, which bins have caused."""
        with self.sync_context(should_sync=self.sync_on_compute):
            return self._means()[1]

    def _means(self) -> tuple[Tensor, Tensor]:
        if self.bins and self.num_users:
            if beyond := int(self.beyond):
                raise DataError(
                    f"GAUC: {beyond} examples have a user that is not in 0 to {self.num_users - 1}, or a prediction "
                    "that is NaN. Set num_users to the number of users, and number them from 0."
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
