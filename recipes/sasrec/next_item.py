"""What models of the next item share, whatever reads the sequence: the item table, losses, metrics
and predictions."""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torchmetrics import MetricCollection

from lightning_distrec.metrics import retrieval_metrics
from lightning_distrec.retrieval import (
    sampled_softmax_loss,
    softmax_loss,
    target_ranks_in_table,
    top_k,
)


class NextItemModel(pl.LightningModule):
    """Scores items by the product of their embedding with what `encode` makes of the items
    before."""

    def __init__(self, num_items: int, dim: int) -> None:
        """num_items: ids of items are 1 to this number; 0 is "none". dim: numbers per embedding."""
        super().__init__()
        self.items = nn.Embedding(num_items + 1, dim)
        self.val_metrics = retrieval_metrics(10, prefix="val_")
        self.test_metrics = retrieval_metrics(10, prefix="test_")

    def encode(self, batch: dict[str, Tensor]) -> Tensor:
        """Return what the model makes of each place and those before it, (places, dim)."""
        raise NotImplementedError

    def last_places(self, batch: dict[str, Tensor]) -> Tensor:
        """Return which of the places are the sequences' last ones, (batch_size,)."""
        raise NotImplementedError

    def queries(self, batch: dict[str, Tensor]) -> Tensor:
        """Return what items are scored by, (batch_size, dim)."""
        return self.encode(batch)[self.last_places(batch)]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the softmax loss of each next item, among all items or among those drawn."""
        hidden, following = self.encode(batch), batch["following"].flatten()
        num_negatives = self.hparams["num_negatives"]
        if num_negatives == 0:
            loss = softmax_loss(hidden, self.items, following, ignore_index=0)
        else:
            loss = sampled_softmax_loss(
                hidden,
                self.items,
                following,
                num_negatives=num_negatives,
                step=self.global_step,
                ignore_index=0,
            )
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

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the ten items that come next most likely and their scores, (batch_size, 10)
        each."""
        queries = self.queries(batch)
        scores, items = top_k(queries, self.items, 10, exclude=_no_item(queries))
        return {"items": items, "scores": scores}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam over all parameters."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams["learning_rate"])

    def _evaluate(self, metrics: MetricCollection, batch: dict[str, Tensor]) -> None:
        queries = self.queries(batch)
        target = batch["following"].flatten()[self.last_places(batch)]
        metrics.update(
            target_ranks_in_table(queries, self.items, target, excluded=_no_item(queries))
        )
        self.log_dict(metrics, batch_size=len(target))


def _no_item(queries: Tensor) -> Tensor:
    # Row 0 is "none". Items seen before may come again.
    return queries.new_zeros(queries.shape[0], 1, dtype=torch.long)
