"""A click model whose ids have no fixed range, and its batches."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from torchrec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from lightning_distrec.sharding.mapping.spec import RowsOfIds

FEATURES = ["user", "item", "shop"]
BUCKETS = 6
ROWS = {"users": 24, "goods": 36}
FEATURES_OF = {"users": ["user"], "goods": ["item", "shop"]}
TTL_HOURS = 1


def hash_zch(name: str, evicts: bool = False, **options: Any) -> HashZchManagedCollisionModule:
    """Return TorchRec's module for one table."""
    eviction = {
        "eviction_policy_name": HashZchEvictionPolicyName.LRU_EVICTION,
        "eviction_config": HashZchEvictionConfig(features=[], single_ttl=TTL_HOURS),
    }
    own_part = {"zch_size": ROWS[name], "total_num_buckets": BUCKETS, "name": name, "max_probe": 3}
    own_part |= (eviction if evicts else {}) | options
    return HashZchManagedCollisionModule(device=torch.device("cpu"), **own_part)


class ManagedModel(pl.LightningModule):
    """Bags of two tables, of which one is looked up by two features."""

    pooled = True
    maps_by: Any = staticmethod(hash_zch)

    def __init__(
        self, evicts: bool = False, optimizer: str = "Adagrad", init: Any = None, **options: Any
    ) -> None:
        super().__init__()
        self.optimizer = optimizer
        kind = EmbeddingBagConfig if self.pooled else EmbeddingConfig
        scale, first = options.get("scale", 1), {} if init is None else {"init_fn": init}
        configs = [
            kind(
                name=name,
                embedding_dim=8,
                num_embeddings=rows * scale,
                feature_names=FEATURES_OF[name],
                **first,
            )
            for name, rows in ROWS.items()
        ]
        modules = {config.name: self.maps_by(config.name, evicts, **options) for config in configs}
        collisions = ManagedCollisionCollection(modules, configs)
        if self.pooled:
            self.mc = ManagedCollisionEmbeddingBagCollection(
                EmbeddingBagCollection(tables=configs), collisions
            )
        else:
            self.mc = ManagedCollisionEmbeddingCollection(
                EmbeddingCollection(tables=configs), collisions
            )
        self.over = nn.Linear(24, 1, bias=False)
        self.losses: list[float] = []

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        actual, _ = self.mc(features)
        if self.pooled:
            return self.over(actual.values()).squeeze(-1)
        bags = [
            torch.segment_reduce(actual[f].values(), "sum", lengths=actual[f].lengths())
            for f in FEATURES
        ]
        return self.over(torch.cat(bags, 1)).squeeze(-1)

    def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
        loss = nn.functional.binary_cross_entropy_with_logits(self(batch), batch["label"])
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: dict[str, Tensor], _: int) -> None:
        self.losses.append(
            float(nn.functional.binary_cross_entropy_with_logits(self(batch), batch["label"]))
        )

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.1)


class ManagedSequences(ManagedModel):
    """The same over an EmbeddingCollection."""

    pooled = False


def learn(mapping: RowsOfIds, ids: Tensor) -> Tensor:
    """Let a mapping learn the ids of a lookup. Return the rows that an id was evicted from."""
    evicted = mapping.learn(mapping.note_lookup(ids).tolist())
    return evicted[evicted >= 0]


def make_batch(seed: int, size: int = 4, kinds: int = 60) -> dict[str, Tensor]:
    """Return examples whose ids are large; `kinds` different ones for each feature, the first ones
    more often."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(FEATURES) * size,), generator=draw)
    numbers = (torch.rand(int(lengths.sum()), generator=draw) ** 2 * kinds).long()
    label = torch.randint(0, 2, (size,), generator=draw).float()
    first = torch.randint(0, kinds, (size,), generator=draw) * 2**40
    return {"ids": numbers * 1_000_000_007 + 5, "lengths": lengths, "label": label, "first": first}


def joined(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the global batch of the ranks' batches."""
    parts: list[Tensor] = []
    lengths: list[Tensor] = []
    for feature in range(len(FEATURES)):
        for batch in batches:
            size = len(batch["label"])
            bags = batch["ids"].split(batch["lengths"].tolist())
            parts += bags[feature * size : (feature + 1) * size]
            lengths.append(batch["lengths"][feature * size : (feature + 1) * size])
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in ("label", "first")}
    return {"ids": torch.cat(parts), "lengths": torch.cat(lengths), **whole}


def loader(
    first: int, last: int, rank: int, num_ranks: int, batch_parts: int, kinds: int = 60
) -> DataLoader[Any]:
    """Return the batches of a rank in steps `first` to `last`: those of `of` ranks, shared by
    `num_ranks`."""
    local = range(rank * batch_parts // num_ranks, (rank + 1) * batch_parts // num_ranks)
    steps = [
        [make_batch(100 * step + r, kinds=kinds) for r in local] for step in range(first, last)
    ]
    return DataLoader([joined(batches) for batches in steps], batch_size=None)


class Bags(nn.Module):
    """Returns what a managed collection returns, of an ordinary one."""

    def __init__(self, bags: EmbeddingBagCollection) -> None:
        super().__init__()
        self.bags = bags

    def forward(self, features: KeyedJaggedTensor) -> Any:
        return self.bags(features), None


class DynamicModel(ManagedModel):
    """The same with an ordinary collection, and an nn.Embedding of the first id of each example."""

    def __init__(self, optimizer: str = "Adagrad") -> None:
        super().__init__(optimizer=optimizer)
        self.mc = Bags(self.mc._embedding_module)
        self.first = nn.Embedding(20, 8)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return super().forward(batch) + self.first(batch["first"]).sum(1)


class Checkpointed(DynamicModel):
    """The same inside of an activation checkpoint."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        actual: Tensor = checkpoint(super().forward, batch, use_reentrant=self.reentrant)
        return actual


class Padded(DynamicModel):
    """The same with a row of zeros for an id."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(20, 8, padding_idx=0)


POLICIES = {
    "lfu": LFU_EvictionPolicy,
    "lru": LRU_EvictionPolicy,
    "distance": DistanceLFU_EvictionPolicy,
}


def remainders(ids: Tensor, size: int) -> Tensor:
    """Return numbers below `size` for ids."""
    return ids % 999_983 * 7_919 % size


def mch(
    name: str,
    _: bool = False,
    policy: str = "lfu",
    interval: int = 2,
    scale: int = 1,
    filters: Any = None,
    buckets: int = BUCKETS,
    device: str = "cpu",
    **options: Any,
) -> MCHManagedCollisionModule:
    """Return TorchRec's other module for one table."""
    entry = POLICIES[policy](threshold_filtering_func=filters)
    return MCHManagedCollisionModule(
        zch_size=ROWS[name] * scale,
        device=torch.device(device),
        eviction_policy=entry,
        eviction_interval=interval,
        name=name,
        buckets=buckets,
        **options,
    )


class MchModel(ManagedModel):
    """The same with MCHManagedCollisionModules."""

    maps_by = staticmethod(mch)


class MchSequences(MchModel):
    """The same over an EmbeddingCollection."""

    pooled = False
