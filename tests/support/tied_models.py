"""Models whose output layer is an embedding table: logits over all items, and propagation over a
graph."""

from typing import Any

import torch
from torch import Tensor, nn

from tests.support.embedding_models import KeepsState, SASRec


class TiedSASRec(SASRec):
    """SASRec with cross-entropy over all items, whose output weights are the item table's, read in
    a property."""

    @property
    def output_weight(self) -> Tensor:
        return self.item_embedding.weight[1:]

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        items, positives, _ = batch
        seen = positives != 0
        logits = self(items)[seen] @ self.output_weight.T
        return nn.functional.cross_entropy(logits, positives[seen] - 1)

    def predict_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        return nn.functional.linear(self(batch[0])[:, -1], self.item_embedding.weight)

    validation_step = predict_step  # type: ignore[assignment]


class LightGCN(KeepsState):
    """Propagates all rows of two tables over a graph, then scores pairs."""

    def __init__(self, num_users: int = 50, num_items: int = 71, dim: int = 16) -> None:
        super().__init__()
        self.user = nn.Embedding(num_users, dim)
        self.item = nn.Embedding(num_items, dim)
        draw = torch.Generator().manual_seed(3)
        size = num_users + num_items
        edges = torch.stack([torch.randint(0, size, (300,), generator=draw) for _ in range(2)])
        graph = (
            torch
            .sparse_coo_tensor(edges, torch.full((300,), 0.3), (size, size))
            .coalesce()
            .to_dense()
        )
        self.register_buffer("graph", graph)

    def forward(self) -> tuple[Tensor, Tensor]:
        rows = torch.cat([self.user.weight, self.item.weight])
        total = rows
        for _ in range(2):
            rows = self.graph @ rows
            total = total + rows
        users, items = total.split([self.user.num_embeddings, self.item.num_embeddings])
        return users, items

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        users, items = self()
        user, item = batch
        scores = users[user] @ items.T
        squares = self.user.weight.pow(2).sum() + self.item(item).pow(2).sum()
        return nn.functional.cross_entropy(scores, item) + 1e-3 * squares

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        users, items = self()
        self.log(
            "val_loss",
            (users[batch[0]] * items[batch[1]]).sum(),
            sync_dist=True,
            batch_size=len(batch[0]),
        )

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        users, items = self()
        return users[batch[0]] @ items.T

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.05, eps=1e-5)
