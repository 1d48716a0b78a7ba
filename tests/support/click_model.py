"""An ordinary LightningModule with embedding tables, its batches, and the plain loop it is compared
with."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.modules.embedding_configs import PoolingType

from tests.support.embedding_models import whole_state
from tests.support.ranks import rank_and_num_ranks

FEATURES = ["a", "b", "c", "d"]
NO_OUTPUT: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def bag_configs(pooling: PoolingType = PoolingType.SUM) -> list[EmbeddingBagConfig]:
    """Three tables of unequal dims; feature b is looked up in two of them."""
    return [
        EmbeddingBagConfig(
            name="wide",
            embedding_dim=16,
            num_embeddings=60,
            feature_names=["a", "b"],
            pooling=pooling,
        ),
        EmbeddingBagConfig(
            name="narrow", embedding_dim=8, num_embeddings=37, feature_names=["c"], pooling=pooling
        ),
        EmbeddingBagConfig(
            name="shared",
            embedding_dim=8,
            num_embeddings=11,
            feature_names=["b", "d"],
            pooling=pooling,
        ),
    ]


class ClickModel(pl.LightningModule):
    """Looks up bags, reads them by column position, and keeps its losses.

    optimizer: a class from torch.optim or torchrec; options: its arguments.
    """

    def __init__(
        self,
        optimizer: type,
        options: dict[str, Any],
        pooling: str = "sum",
        weighted: bool = False,
        meta: bool = False,
    ) -> None:
        super().__init__()
        self.optimizer, self.options, self.weighted = optimizer, options, weighted
        self.pooling = PoolingType.SUM if pooling == "sum" else PoolingType.MEAN
        self.ebc: EmbeddingBagCollection | None = None
        if not meta:
            self._build()
        self.mlp = nn.Sequential(
            nn.Linear(56, 16, bias=False), nn.ReLU(), nn.Linear(16, 1, bias=False)
        )
        self.losses: list[float] = []
        self.final_state: dict[str, Tensor] = {}

    def _build(self) -> None:
        self.ebc = EmbeddingBagCollection(
            tables=bag_configs(self.pooling), is_weighted=self.weighted
        )

    def configure_model(self) -> None:
        if self.ebc is None:
            self._build()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(
            keys=FEATURES,
            values=batch["ids"],
            lengths=batch["lengths"],
            weights=batch["weights"] if self.weighted else None,
        )
        return self.mlp(self.ebc(features).values()).squeeze(-1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.binary_cross_entropy_with_logits(self(batch), batch["label"])
        if self._trainer is not None:
            self.log("loss", loss, batch_size=len(batch["label"]))
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), **self.options)

    def on_train_end(self) -> None:
        self.final_state = whole_state(self)


class EvaluatedModel(ClickModel):
    """A click model with all four steps."""

    def validation_step(
        self, batch: dict[str, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        loss = nn.functional.binary_cross_entropy_with_logits(self(batch), batch["label"])
        self.log("val_loss", loss, sync_dist=True, batch_size=len(batch["label"]))

    test_step = validation_step

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self(batch)


class LooksUpTwice(ClickModel):
    """Calls its collection twice in a step."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch) + super().forward(
            batch | {"ids": (batch["ids"] * 7 + 1) % 11}
        )


class SequenceModel(ClickModel):
    """The same over an EmbeddingCollection: one vector per id, averaged by the model itself."""

    def _build(self) -> None:
        configs = [
            EmbeddingConfig(
                name="wide", embedding_dim=8, num_embeddings=60, feature_names=["a", "b"]
            ),
            EmbeddingConfig(
                name="narrow", embedding_dim=8, num_embeddings=37, feature_names=["c", "d"]
            ),
        ]
        self.ebc = EmbeddingCollection(tables=configs)
        self.first = nn.Linear(32, 56, bias=False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        rows = self.ebc(features)
        bags = [_mean(rows[name].values(), rows[name].lengths()) for name in FEATURES]
        return self.mlp(self.first(torch.cat(bags, 1))).squeeze(-1)


def _mean(values: Tensor, lengths: Tensor) -> Tensor:
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    sums = values.new_zeros(len(lengths), values.shape[1]).index_add(0, owner, values)
    return sums / lengths.clamp(min=1).unsqueeze(1)


def make_batch(seed: int, size: int = 8) -> dict[str, Tensor]:
    """Return `size` examples; ids of each feature in range of its smallest table, bags of 0 to 4
    ids."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (len(FEATURES) * size,), generator=draw)
    limits = torch.tensor([60, 11, 37, 11]).repeat_interleave(size).repeat_interleave(lengths)
    ids = (torch.rand(len(limits), generator=draw) * limits).long()
    label = torch.randint(0, 2, (size,), generator=draw).float()
    return {
        "ids": ids,
        "lengths": lengths,
        "weights": torch.rand(len(ids), generator=draw) + 0.5,
        "label": label,
    }


def join_batches(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the global batch of the ranks' batches."""
    joined: dict[str, list[Tensor]] = {"ids": [], "lengths": [], "weights": []}
    for feature in range(len(FEATURES)):
        for batch in batches:
            size = len(batch["label"])
            ends = torch.cat([torch.zeros(1, dtype=torch.long), batch["lengths"].cumsum(0)])
            part = slice(int(ends[feature * size]), int(ends[(feature + 1) * size]))
            joined["ids"].append(batch["ids"][part])
            joined["weights"].append(batch["weights"][part])
            joined["lengths"].append(batch["lengths"][feature * size : (feature + 1) * size])
    return {key: torch.cat(parts) for key, parts in joined.items()} | {
        "label": torch.cat([b["label"] for b in batches])
    }


def rank_loader(steps: int, rank: int, first: int = 0) -> DataLoader:
    """Return the loader of one rank, batches as they are."""
    return DataLoader(
        [make_batch(1000 * step + rank) for step in range(first, first + steps)], batch_size=None
    )


def train_unsharded(
    model: ClickModel,
    steps: int,
    num_ranks: int,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> ClickModel:
    """Train `model` in this process by a plain torch loop over the ranks' global batches; returns a
    trained copy.

    context: entered around each forward.
    """
    model = copy.deepcopy(model)
    optimizer = model.configure_optimizers()
    for step in range(steps):
        batch = join_batches([make_batch(1000 * step + rank) for rank in range(num_ranks)])
        with context():
            loss = model.training_step(batch, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.final_state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return model


def seeded(make: Any, *args: Any, **options: Any) -> Any:
    """Return `make(*args, **options)` with the weights that every rank and the reference share."""
    torch.manual_seed(7)
    return make(*args, **options)


def train_sharded(
    model: ClickModel,
    steps: int | None,
    strategy: dict[str, Any] | None = None,
    **trainer_options: Any,
) -> tuple[ClickModel, pl.Trainer]:
    """Train `model` on this rank through Lightning, tables sharded. steps: None for the loaders of
    the model itself."""
    from lightning_distrec import TorchRecShardedStrategy

    rank, num_ranks = rank_and_num_ranks()
    trainer = pl.Trainer(
        strategy=TorchRecShardedStrategy(**(strategy or {})),
        accelerator="cpu",
        devices=num_ranks,
        **(
            {"max_epochs": 1, "use_distributed_sampler": False, "num_sanity_val_steps": 0}
            | NO_OUTPUT
            | trainer_options
        ),
    )
    trainer.fit(model, None if steps is None else rank_loader(steps, rank))
    return model, trainer


def largest_difference(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return the largest absolute difference of tables and of dense weights."""
    assert actual.keys() == expected.keys(), (sorted(actual), sorted(expected))
    differences = {"tables": 0.0, "dense": 0.0}
    for key, value in expected.items():
        kind = "tables" if "embedding" in key else "dense"
        assert actual[key].shape == value.shape, key
        difference = float((actual[key] - value).abs().max())
        assert difference == difference, f"{key} has NaNs"
        differences[kind] = max(differences[kind], difference)
    return differences


class StepsEverySecondTime:
    """A part of a module: it lets the optimizer step at every second batch."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any
    ) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()
