"""Click models whose managed collision collections are wrapped, or replaced, by other modules."""

from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.mc_adapter import McEmbeddingBagCollectionAdapter
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection

from tests.support.mapped_models import BUCKETS, FEATURES, ROWS, ManagedModel


class Adapted(ManagedModel):
    """TorchRec makes the collections, and evicts what was not used for an hour."""

    def __init__(self) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name="users", embedding_dim=8, num_embeddings=ROWS["users"], feature_names=["user"]
            ),
            EmbeddingBagConfig(
                name="goods", embedding_dim=8, num_embeddings=36, feature_names=["item", "shop"]
            ),
        ]
        entry = {
            "tables": configs,
            "input_hash_size": 0,
            "device": torch.device("cpu"),
            "world_size": 1,
        }
        adapter = McEmbeddingBagCollectionAdapter(
            **entry, zch_method="mpzch", mpzch_num_buckets=BUCKETS
        )  # type: ignore[arg-type]
        self.mc = nn.Module()
        self.mc.adapter = adapter

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        actual: Tensor = self.over(self.mc.adapter(features).values()).squeeze(-1)
        return actual


class _Own(ManagedCollisionEmbeddingBagCollection):
    """A user's subclass."""


class Subclassed(ManagedModel):
    """Its collection is a subclass of TorchRec's."""

    def __init__(self) -> None:
        super().__init__()
        self.mc = _Own(self.mc._embedding_module, self.mc._managed_collision_collection)


class MapsByHand(ManagedModel):
    """Calls the mapping and the collection itself."""

    def __init__(self) -> None:
        super().__init__()
        self.collisions, self.bags = (
            self.mc._managed_collision_collection,
            self.mc._embedding_module,
        )
        del self.mc

    def forward(self, batch: dict[str, Tensor]) -> Any:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        return self.over(self.bags(self.collisions(features)).values()).squeeze(-1)
