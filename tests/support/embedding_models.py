"""Recommenders on nn.Embedding as their users write them, their batches, and the plain loop they
are compared with."""

import copy
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader


class KeepsState(pl.LightningModule):
    """Keeps the whole state that it was trained to."""

    def __init__(self) -> None:
        super().__init__()
        self.final_state: dict[str, Tensor] = {}

    def on_train_end(self) -> None:
        self.final_state = whole_state(self)


class TwoTower(pl.LightningModule):
    """Two-tower retrieval as users write it: in-batch softmax over user and item embeddings."""

    def __init__(self, num_users: int = 50, num_items: int = 70, dim: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.user_embedding = nn.Embedding(num_users, dim)
        self.item_embedding = nn.Embedding(num_items, dim)
        nn.init.xavier_uniform_(self.user_embedding.weight)
        nn.init.xavier_uniform_(self.item_embedding.weight)
        self.user_tower = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.item_tower = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        users = nn.functional.normalize(self.user_tower(self.user_embedding(user)), dim=-1)
        items = nn.functional.normalize(self.item_tower(self.item_embedding(item)), dim=-1)
        return users @ items.T / 0.2

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        scores = self(*batch)
        loss = nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
        if self._trainer is not None:
            self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        scores = self(*batch)
        loss = nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))
        self.log("val_loss", loss, sync_dist=True, batch_size=len(scores))

    test_step = validation_step

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(*batch)

    def configure_optimizers(self) -> Any:
        tables = [p for n, p in self.named_parameters() if "embedding" in n]
        tail = [p for n, p in self.named_parameters() if "embedding" not in n]
        return torch.optim.Adam(
            [{"params": tables, "lr": 1e-3}, {"params": tail, "weight_decay": 0.01}], lr=5e-4
        )


class SASRec(pl.LightningModule):
    """Self-attentive sequential recommendation: one positive and one negative next item for each
    position."""

    def __init__(self, num_items: int = 60, length: int = 9, dim: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.item_embedding = nn.Embedding(num_items + 1, dim, padding_idx=0)
        self.position_embedding = nn.Embedding(length, dim)
        layer = nn.TransformerEncoderLayer(
            dim, 2, 2 * dim, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(dim)

    def forward(self, items: Tensor) -> Tensor:
        length = items.shape[1]
        positions = torch.arange(length, device=items.device).expand_as(items)
        inputs = self.item_embedding(items) * self.item_embedding.embedding_dim**0.5
        inputs = inputs + self.position_embedding(positions)
        inputs = inputs * (items != 0).unsqueeze(-1)
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=items.device)
        return self.norm(self.encoder(inputs, mask=mask, is_causal=True))

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        items, positives, negatives = batch
        states = self(items)
        expected = (states * self.item_embedding(positives)).sum(-1)
        unwanted = (states * self.item_embedding(negatives)).sum(-1)
        seen = positives != 0
        loss = nn.functional.binary_cross_entropy_with_logits(
            expected[seen], torch.ones_like(expected[seen])
        )
        return loss + nn.functional.binary_cross_entropy_with_logits(
            unwanted[seen], torch.zeros_like(unwanted[seen])
        )

    def predict_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        return (self(batch[0])[:, -1].unsqueeze(1) * self.item_embedding(batch[1])).sum(-1)

    def configure_optimizers(self) -> Any:
        # The key biases' gradient is 0 but for rounding, which the default eps would make steps of
        # the full rate.
        return torch.optim.Adam(self.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-5)


def pairs(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return the users and items of one rank's batch."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 50, (12,), generator=draw), torch.randint(0, 70, (12,), generator=draw)


def sequences(step: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the items, the next items and other items of one rank's batch."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    clicks = torch.randint(1, 61, (6, 10), generator=draw)
    starts = torch.randint(0, 6, (6, 1), generator=draw)
    clicks = clicks * (torch.arange(10) >= starts)
    negatives = torch.randint(1, 61, (6, 9), generator=draw) * (clicks[:, 1:] != 0)
    return clicks[:, :-1], clicks[:, 1:], negatives


def loader(batches: list[Any]) -> DataLoader:
    """Return the loader of one rank, batches as they are."""
    return DataLoader(batches, batch_size=None)


def whole_state(model: pl.LightningModule) -> dict[str, Tensor]:
    """Collective. Return a copy of the state with whole tables on rank 0, under any strategy."""
    strategy = model.trainer.strategy
    state = (
        strategy.full_state_dict() if hasattr(strategy, "full_state_dict") else model.state_dict()
    )
    return {key: value.clone().cpu() for key, value in state.items()}


def train_unsharded(model: Any, batches: list[list[Any]]) -> Any:
    """Train a copy of `model` by a plain loop; returns it. batches: step -> rank -> batch."""
    model = copy.deepcopy(model)
    optimizer = model.configure_optimizers()
    for step, rank_results in enumerate(batches):
        optimizer.zero_grad()
        torch.stack([model.training_step(batch, step) for batch in rank_results]).mean().backward()
        optimizer.step()
    return model


def differences(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest absolute difference of each entry; the keys must be the same, in order."""
    assert list(actual) == list(expected)
    assert all(actual[key].shape == expected[key].shape for key in expected)
    return {key: float((actual[key] - expected[key]).abs().max()) for key in expected}


def too_far(
    actual: dict[str, Tensor], expected: dict[str, Tensor], limit: float
) -> dict[str, float]:
    """Return the differences above `limit`, NaNs among them."""
    return {
        key: value for key, value in differences(actual, expected).items() if not value <= limit
    }
