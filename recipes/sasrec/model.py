"""An ordinary LightningModule: self-attention over a sequence of items predicts the next one.

Nothing here knows of ranks or shards. Source of the shape: Kang and McAuley, Self-Attentive Sequential Recommendation,
ICDM 2018; trained on the softmax over all items, as RecBole trains it.
"""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MetricCollection

from lightning_distrec.errors import ConfigError
from lightning_distrec.metrics import ranks_in_scores, retrieval_metrics


class SASRec(pl.LightningModule):
    """Scores items by the product of their embedding with what attention makes of the sequence."""

    mask: Tensor
    """(length, length): -inf where a place would look at later ones."""
    all_items: Tensor
    """(num_items + 1,): every id."""

    def __init__(
        self,
        num_items: int = 1682,
        length: int = 50,
        dim: int = 64,
        num_layers: int = 2,
        num_heads: int = 2,
        hidden: int = 256,
        dropout: float = 0.5,
        num_negatives: int = 0,
        learning_rate: float = 0.001,
    ) -> None:
        """Set the size of the model and its learning rate; most defaults are RecBole's for SASRec.

        Args:
            num_items: ids of items are 1 to this number; 0 is "none".
            length: most items in a sequence.
            dim: numbers per embedding, a multiple of 4 and of num_heads.
            num_layers: blocks of attention and a small network.
            num_heads: heads of each attention.
            hidden: width of the small networks.
            dropout: share of numbers that are dropped in training.
            num_negatives: items drawn per step as negatives for all places of the batch; 0: all items, which suits
                vocabularies of some ten thousand.
            learning_rate: Adam's.
        """
        super().__init__()
        if dim % num_heads or dim % 4:
            raise ConfigError(f"dim={dim}: it must be a multiple of 4 and of num_heads={num_heads}.")
        self.save_hyperparameters()
        self.items = nn.Embedding(num_items + 1, dim)
        self.positions = nn.Embedding(length, dim)
        self.start = nn.Sequential(nn.LayerNorm(dim), nn.Dropout(dropout))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, num_heads, hidden, dropout, activation="gelu", batch_first=True)
            for _ in range(num_layers)
        )
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)
        self.register_buffer("all_items", torch.arange(num_items + 1), persistent=False)
        self.val_metrics = retrieval_metrics(10, prefix="val_")
        self.test_metrics = retrieval_metrics(10, prefix="test_")
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, items: Tensor) -> Tensor:
        """Return what the model makes of each place and those before it, (batch_size, length, dim).

        items: (batch_size, length) int64.
        """
        hidden = self.start(self.items(items) + self.positions(torch.arange(items.shape[1], device=items.device)))
        for block in self.blocks:
            hidden = block(hidden, src_mask=self.mask, is_causal=True)
        return hidden

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the softmax loss of each next item, among all items or among those drawn."""
        hidden, following = self(batch["items"]).flatten(0, 1), batch["following"].flatten()
        if self.hparams["num_negatives"] == 0:
            loss = functional.cross_entropy(self._scores(hidden), following, ignore_index=0)
        else:
            loss = self._sampled_loss(hidden, following)
        # The mean over the epoch and all ranks; ranks exchange it once per epoch.
        size = len(batch["length"])
        self.log("train_loss", loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=size, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Add a batch to the validation's hit rate and NDCG."""
        self._evaluate(self.val_metrics, batch)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Add a batch to the test's hit rate and NDCG."""
        self._evaluate(self.test_metrics, batch)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the ten items that come next most likely, (batch_size, 10)."""
        return self._scores(self._last(batch)).topk(10).indices

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam over all parameters."""
        return torch.optim.Adam(self.parameters(), lr=self.hparams["learning_rate"])

    def _sampled_loss(self, hidden: Tensor, following: Tensor) -> Tensor:
        drawn = torch.randint(1, len(self.all_items), (self.hparams["num_negatives"],), device=following.device)
        rows = self.items(torch.cat([following, drawn]))
        positives, negatives = rows[: len(following)], rows[len(following) :]
        against = (hidden @ negatives.T).masked_fill(drawn == following[:, None], float("-inf"))
        scores = torch.cat([(hidden * positives).sum(1, keepdim=True), against], dim=1)
        return functional.cross_entropy(scores, torch.where(following > 0, 0, -1), ignore_index=-1)

    def _last(self, batch: dict[str, Tensor]) -> Tensor:
        """Return what the model makes of each window, (batch_size, dim)."""
        # Of the shape, not of len(): torch.export keeps the first free, and takes the second as a fixed number.
        places = torch.arange(batch["length"].shape[0], device=batch["length"].device)
        return self(batch["items"])[places, batch["length"] - 1]

    def _scores(self, hidden: Tensor) -> Tensor:
        """Return a score for each item, (N, num_items + 1). hidden: (N, dim). Items seen before may come again."""
        scores = hidden @ self.items(self.all_items).T
        # Id 0 is "none" and never comes next.
        return scores.masked_fill(self.all_items == 0, float("-inf"))

    def _evaluate(self, metrics: MetricCollection, batch: dict[str, Tensor]) -> None:
        places = torch.arange(len(batch["length"]), device=batch["length"].device)
        target = batch["following"][places, batch["length"] - 1]
        metrics.update(ranks_in_scores(self._scores(self._last(batch)), target))
        self.log_dict(metrics, batch_size=len(target))
