"""What models of the next item share, whatever reads the sequence: the item table, losses, metrics
and predictions."""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MetricCollection

from lightning_distrec.metrics import ranks_in_scores, retrieval_metrics


class NextItemModel(pl.LightningModule):
    """Scores items by the product of their embedding with what `encode` makes of the items
    before."""

    all_items: Tensor
    """(num_items + 1,): every id."""

    def __init__(self, num_items: int, dim: int) -> None:
        """num_items: ids of items are 1 to this number; 0 is "none". dim: numbers per embedding."""
        super().__init__()
        self.items = nn.Embedding(num_items + 1, dim)
        self.register_buffer("all_items", torch.arange(num_items + 1), persistent=False)
        self.val_metrics = retrieval_metrics(10, prefix="val_")
        self.test_metrics = retrieval_metrics(10, prefix="test_")

    def encode(self, batch: dict[str, Tensor]) -> Tensor:
        """Return what the model makes of each place and those before it, (places, dim)."""
        raise NotImplementedError

    def last_places(self, batch: dict[str, Tensor]) -> Tensor:
        """Return which of the places are the sequences' last ones, (batch_size,)."""
        raise NotImplementedError

    def sparse_inputs(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the ids that the loss looks up: the next items, then those drawn as negatives.

        Drawn here and not in the step, since strategies that prefetch lookups call this method one
        batch ahead.
        """
        if (num_negatives := self.hparams["num_negatives"]) == 0:
            return {}
        following = batch["following"].flatten()
        drawn = torch.randint(1, len(self.all_items), (num_negatives,), device=following.device)
        return {"candidates": torch.cat([following, drawn])}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the softmax loss of each next item, among all items or among those drawn."""
        hidden, following = self.encode(batch), batch["following"].flatten()
        if self.hparams["num_negatives"] == 0:
            loss = functional.cross_entropy(self._scores(hidden), following, ignore_index=0)
        else:
            loss = self._sampled_loss(hidden, following, self.sparse_inputs(batch)["candidates"])
        # The mean over the epoch and all ranks; ranks exchange it once per epoch.
        size = len(batch["length"])
        self.log(
            "train_loss",
            loss,
            on_step=False,
            on_epoch=True,
            prog_bar=True,
            batch_size=size,
            sync_dist=True,
        )
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Add a batch to the validation's hit rate and NDCG."""
        self._evaluate(self.val_metrics, batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Add a batch to the test's hit rate and NDCG."""
        self._evaluate(self.test_metrics, batch)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the ten items that come next most likely, (batch_size, 10)."""
        return self._scores(self.encode(batch)[self.last_places(batch)]).topk(10).indices

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam over all parameters."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams["learning_rate"])

    def _sampled_loss(self, hidden: Tensor, following: Tensor, candidates: Tensor) -> Tensor:
        rows, drawn = self.items(candidates), candidates[len(following) :]
        positives, negatives = rows[: len(following)], rows[len(following) :]
        against = (hidden @ negatives.T).masked_fill(drawn == following[:, None], float("-inf"))
        scores = torch.cat([(hidden * positives).sum(1, keepdim=True), against], dim=1)
        return functional.cross_entropy(scores, torch.where(following > 0, 0, -1), ignore_index=-1)

    def _scores(self, hidden: Tensor) -> Tensor:
        """Return a score for each item, (N, num_items + 1). hidden: (N, dim). Items seen before may
        come again."""
        scores = hidden @ self.items(self.all_items).T
        # Id 0 is "none" and never comes next.
        return scores.masked_fill(self.all_items == 0, float("-inf"))

    def _evaluate(self, metrics: MetricCollection, batch: dict[str, Tensor]) -> None:
        places = self.last_places(batch)
        target = batch["following"].flatten()[places]
        metrics.update(ranks_in_scores(self._scores(self.encode(batch)[places]), target))
        self.log_dict(metrics, batch_size=len(target))
