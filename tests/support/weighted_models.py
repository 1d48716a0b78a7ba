"""Click models whose ids have weights that learn: by feature processors of torchrec, and by a layer
of the user's."""

from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.modules.feature_processor_ import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from tests.support.click_model import FEATURES, ClickModel, bag_configs
from tests.support.ranks import rank_and_num_ranks

LONGEST = 4


class PositionWeighted(ClickModel):
    """A feature processor around the collection. kind: "together" or "by feature"."""

    def __init__(self, optimizer: type, options: dict[str, Any], kind: str = "together") -> None:
        self.kind = kind
        super().__init__(optimizer, options)

    def _build(self) -> None:
        tables = EmbeddingBagCollection(tables=bag_configs(), is_weighted=True)
        if self.kind == "together":
            processors: Any = PositionWeightedModuleCollection(dict.fromkeys(FEATURES, LONGEST))
            weights = list(processors.position_weights.values())
        else:
            processors = {name: PositionWeightedModule(LONGEST) for name in FEATURES}
            weights = [processor.position_weight for processor in processors.values()]
        for weight in weights:
            nn.init.uniform_(weight, 0.5, 1.5)
        self.ebc = FeatureProcessedEmbeddingBagCollection(tables, processors)


class WeightsOfALayer(ClickModel):
    """A layer of the user's makes the weights of an EmbeddingBagCollection's ids and of an
    nn.EmbeddingBag's."""

    def __init__(self, optimizer: type, options: dict[str, Any]) -> None:
        super().__init__(optimizer, options, weighted=True)
        self.importance = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
        self.bag = nn.EmbeddingBag(60, 8, mode="sum", include_last_offset=True)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        weights = self.importance(batch["weights"].unsqueeze(1)).squeeze(1)
        scores = super().forward(batch | {"weights": weights})
        features = KeyedJaggedTensor(
            FEATURES, batch["ids"], lengths=batch["lengths"], weights=weights
        )["a"]
        bags = self.bag(
            features.values(), features.offsets(), per_sample_weights=features.weights().exp()
        )
        return scores + bags.sum(1)


class Evaluated(PositionWeighted):
    """Has a feature processor, and an nn.EmbeddingBag with learned weights; is validated too."""

    def __init__(self, optimizer: type, options: dict[str, Any]) -> None:
        super().__init__(optimizer, options)
        self.bag = nn.EmbeddingBag(60, 8, mode="sum")
        self.importance = nn.Parameter(torch.linspace(0.5, 1.5, 4).repeat(8, 1))
        self.found: list[Any] = []

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch) + self.bag(
            batch["matrix"], per_sample_weights=self.importance
        ).sum(1)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.found.append(self(batch).tolist())

    def on_train_end(self) -> None:
        super().on_train_end()
        ahead = self.trainer.strategy.lookups_ahead
        self.found += [(kind, entry.lookups, entry.ahead) for kind, entry in sorted(ahead.items())]


class LooksUpTwice(WeightsOfALayer):
    """Calls its collection twice in a step."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch) + super().forward(
            batch | {"ids": (batch["ids"] * 7 + 1) % 11}
        )


class FreezesTables(PositionWeighted):
    """Freezes its tables after two batches; the processor learns on."""

    def on_train_batch_end(self, *_: Any) -> None:
        if len(self.losses) == 2:
            self.ebc._embedding_bag_collection.requires_grad_(False)


class RanksDisagree(WeightsOfALayer):
    """On rank 1 the weights need no gradient."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        self.importance.requires_grad_(rank_and_num_ranks()[0] == 0)
        return super().forward(batch)


class FreezesProcessors(PositionWeighted):
    """Freezes its feature processor before the fourth batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.ebc._feature_processors.requires_grad_(False)


class FreezesBeforeBackward(WeightsOfALayer):
    """Steps by hand, with a backward between its two lookups; on rank 1 the weights of the fourth
    need no gradient."""

    automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.importance.requires_grad_(batch_idx < 3 or rank_and_num_ranks()[0] != 1)
        weights = self.importance(batch["weights"].unsqueeze(1)).squeeze(1)
        features = KeyedJaggedTensor(
            FEATURES, batch["ids"], lengths=batch["lengths"], weights=weights
        )
        self.manual_backward(self.mlp(self.ebc(features).values()).square().sum())
        bag = features["a"]
        self.manual_backward(
            self.bag(bag.values(), bag.offsets(), per_sample_weights=bag.weights().detach()).sum()
        )
        self.losses.append(0.0)


class SharesBags(WeightsOfALayer):
    """Looks up each distinct bag of feature a once, and spreads it over the batch by inverse
    indices."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        size = len(batch["label"])
        inverse = torch.arange(size).repeat(len(FEATURES), 1)
        inverse[0] = inverse[0] // 2
        first = batch["lengths"][: size // 2]
        retained = torch.arange(len(batch["ids"]))
        retained = torch.cat([
            retained[: int(first.sum())],
            retained[int(batch["lengths"][:size].sum()) :],
        ])
        features = KeyedJaggedTensor(
            keys=FEATURES,
            values=batch["ids"][retained],
            lengths=torch.cat([first, batch["lengths"][size:]]),
            weights=self.importance(batch["weights"][retained].unsqueeze(1)).squeeze(1),
            stride_per_key_per_rank=[[size // 2], [size], [size], [size]],
            inverse_indices=(FEATURES, inverse),
        )
        return self.mlp(self.ebc(features).values()).squeeze(-1)
