"""TorchRec's own test models (TestSparseNN and its kin) of drawn configurations, in a
LightningModule."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn, optim
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.test_utils.model_input import ModelInput
from torchrec.distributed.test_utils.test_model import (
    TestMixedEmbeddingSparseArch,
    TestOverArch,
    TestOverArchLarge,
    TestOverArchRegroupModule,
    TestSparseNN,
    TestTowerCollectionSparseNN,
    TestTowerSparseNN,
)
from torchrec.optim import RowWiseAdagrad

from tests.support.embedding_models import whole_state

OVER_ARCHS = {"regrouped": TestOverArchRegroupModule, "large": TestOverArchLarge}
TOWERS = {"tower": TestTowerSparseNN, "towers": TestTowerCollectionSparseNN}
KINDS = ("pooled", "processed", "weighted", "shared", "sequence", "mixed", *OVER_ARCHS, *TOWERS)
CUTS = ("table_wise", "row_wise", "column_wise", "table_row_wise", "data_parallel", "")
"""Sharding types, and "" for that of the plan."""
OPTIMIZERS = ("SGD", "momentum", "Adagrad", "Adam", "groups", "RowWiseAdagrad by hand")
IN_BACKWARD: dict[str, tuple[type, dict[str, Any]]] = {
    "SGD": (optim.SGD, {"lr": 0.3}),
    "Adagrad": (optim.Adagrad, {"lr": 0.02, "eps": 1e-5}),
    "RowWiseAdagrad": (RowWiseAdagrad, {"lr": 0.02, "eps": 1e-5}),
    "Adam": (optim.Adam, {"lr": 1e-3, "eps": 1e-6}),
}
NUM_FLOATS, STEPS = 10, 5


@dataclass(frozen=True)
class DrawnTable:
    """One table. in_backward: a name of `IN_BACKWARD`, or "" where configure_optimizers has its
    optimizer."""

    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    mean: bool = False
    cut: str = ""
    in_backward: str = ""

    def config(self, pooled: bool = True) -> Any:
        """Return TorchRec's configuration."""
        options: dict[str, Any] = {
            "name": self.name,
            "num_embeddings": self.rows,
            "embedding_dim": self.dim,
            "feature_names": list(self.features),
        }
        if not pooled:
            return EmbeddingConfig(**options)
        return EmbeddingBagConfig(
            **options, pooling=PoolingType.MEAN if self.mean else PoolingType.SUM
        )


@dataclass(frozen=True)
class DrawnModel:
    """A model and its batches."""

    seed: int
    kind: str
    tables: tuple[DrawnTable, ...]
    weighted_tables: tuple[DrawnTable, ...]
    optimizer: str
    has_offsets: bool
    has_small_ids: bool
    batch_size: int


def drawn_model(seed: int, in_backward: bool) -> DrawnModel:
    """Return the model of a seed. in_backward: whether tables have optimizers that are applied in
    backward."""
    draw = random.Random(f"{seed} {in_backward}")
    kind, optimizer = draw.choice(KINDS), draw.choice(OPTIMIZERS)
    by_row = optimizer.startswith("RowWise")
    one_dim = draw.choice((4, 8, 16)) if kind in ("sequence", "mixed") else 0
    num_tables = 4 if kind in TOWERS else draw.randint(2, 5)
    num_weighted = (
        2 if kind in TOWERS else draw.randint(1, 3) if kind in ("weighted", *OVER_ARCHS) else 0
    )

    def table(name: str, feature: str, dim: int, mean: bool) -> DrawnTable:
        names = [feature, f"{feature}_other"][: 2 if draw.random() < 0.3 else 1]
        update = draw.choice(["", *IN_BACKWARD]) if in_backward else ""
        cuts = [cut for cut in CUTS if not (one_dim and cut in ("table_row_wise", "data_parallel"))]
        if by_row or update.startswith("RowWise") or dim < 8:
            cuts.remove("column_wise")
        return DrawnTable(
            name, draw.randint(6, 80), dim, tuple(names), mean, draw.choice(cuts), update
        )

    dims = [one_dim or draw.choice((4, 8, 16, 32)) for _ in range(num_tables)]
    tables = [
        table(f"table_{i}", f"feature_{i}", dim, draw.random() < 0.5) for i, dim in enumerate(dims)
    ]
    if kind == "processed":  # TorchRec names feature processors by tables
        tables = [
            replace(part, features=(part.name,), mean=part.mean and i > 0)
            for i, part in enumerate(tables)
        ]
    if kind == "shared":
        tables[1] = replace(
            tables[1], rows=tables[0].rows, features=(*tables[1].features, tables[0].features[0])
        )
    weighted = [
        replace(
            table(f"weighted_{i}", f"weight_{i}", draw.choice((4, 8, 16)), False),
            features=(f"weight_{i}",),
        )
        for i in range(num_weighted)
    ]
    flags = draw.random() < 0.3, draw.random() < 0.3
    return DrawnModel(
        seed, kind, tuple(tables), tuple(weighted), optimizer, *flags, draw.choice((1, 2, 3))
    )


def _net(model: DrawnModel) -> nn.Module:
    weighted: Any = [table.config() for table in model.weighted_tables]
    if model.kind in ("sequence", "mixed"):
        pooled = [model.kind == "mixed" and i % 2 == 0 for i in range(len(model.tables))]
        configs = [
            table.config(is_pooled) for table, is_pooled in zip(model.tables, pooled, strict=True)
        ]
        return TestMixedEmbeddingSparseArch(tables=configs, num_float_features=NUM_FLOATS)
    tables: Any = [table.config() for table in model.tables]
    if model.kind in TOWERS:
        return TOWERS[model.kind](
            tables=tables, weighted_tables=weighted, num_float_features=NUM_FLOATS
        )
    groups = None
    if model.kind == "shared":
        features = [feature for table in model.tables for feature in table.features]
        groups = {
            "all": [
                feature if features.count(feature) == 1 else f"{feature}@{table.name}"
                for table in model.tables
                for feature in table.features
            ]
        }
    return TestSparseNN(
        tables=tables,
        weighted_tables=weighted or None,
        num_float_features=NUM_FLOATS,
        over_arch_clazz=OVER_ARCHS.get(model.kind, TestOverArch),
        max_feature_lengths={model.tables[0].name: 10} if model.kind == "processed" else None,
        embedding_groups=groups,
    )


class TorchRecModel(pl.LightningModule):
    """One of TorchRec's test models, with its drawn optimizers."""

    def __init__(self, model: DrawnModel) -> None:
        super().__init__()
        torch.manual_seed(model.seed)
        self.net, self.optimizer = _net(model), model.optimizer
        self.options: dict[str, Any] = {"tables": {}, "find_unused_parameters": True}
        """Of the strategy. TorchRec's over archs do not use all layers, and its towers not all
        tables."""
        self.automatic_optimization = "by hand" not in model.optimizer
        self.losses: list[float] = []
        self.final_state: dict[str, Tensor] = {}
        for table in (*model.tables, *model.weighted_tables):
            weights = [
                weight for name, weight in self.named_parameters() if f".{table.name}." in name
            ]
            if table.cut and weights:
                self.options["tables"][table.name] = {"sharding_types": [table.cut]}
            if table.in_backward and weights:
                kind, options = IN_BACKWARD[table.in_backward]
                _apply_optimizer_in_backward(kind, weights, options)

    def training_step(self, batch: ModelInput, batch_idx: int) -> Tensor | None:
        loss: Tensor = self.net(batch)[0]
        self.losses.append(float(loss.detach()))
        if self.automatic_optimization:
            return loss
        step_all(self.optimizers(), loss, self.manual_backward)
        return None

    def configure_optimizers(self) -> Any:
        named = [
            item
            for item in self.named_parameters()
            if not hasattr(item[1], "_in_backward_optimizers")
        ]
        tables = [
            weight for name, weight in named if "embedding_bags" in name or ".embeddings." in name
        ]
        layers = [
            weight
            for name, weight in named
            if "embedding_bags" not in name and ".embeddings." not in name
        ]
        if self.optimizer == "RowWiseAdagrad by hand":
            by_row = [RowWiseAdagrad(tables, lr=0.02, eps=1e-5)] if tables else []
            return [*by_row, optim.Adam(layers, lr=1e-3, eps=1e-6)]
        if self.optimizer == "groups":
            groups = [{"params": tables, "lr": 0.5}] if tables else []
            return optim.SGD([*groups, {"params": layers, "lr": 0.1, "momentum": 0.9}])
        kind, options = {
            "SGD": (optim.SGD, {"lr": 0.5}),
            "momentum": (optim.SGD, {"lr": 0.2, "momentum": 0.9}),
            "Adagrad": (optim.Adagrad, {"lr": 0.02, "eps": 1e-5}),
            "Adam": (optim.Adam, {"lr": 1e-3, "eps": 1e-6}),
        }[self.optimizer]
        return kind([*tables, *layers], **options)

    def on_train_end(self) -> None:
        self.final_state = whole_state(self)


def step_all(optimizers: Any, loss: Tensor, backward: Any) -> None:
    """Make one step by all optimizers."""
    optimizers = optimizers if isinstance(optimizers, Sequence) else [optimizers]
    for optimizer in optimizers:
        optimizer.zero_grad()
    backward(loss)
    for optimizer in optimizers:
        optimizer.step()


def batches_of(model: DrawnModel, num_ranks: int) -> list[list[ModelInput]]:
    """Return the batches of each step, rank by rank."""
    generator = torch.Generator().manual_seed(model.seed + 1)
    return [[_batch(model, generator) for _ in range(num_ranks)] for _ in range(STEPS)]


def _batch(model: DrawnModel, generator: torch.Generator) -> ModelInput:
    size = model.batch_size
    kind = torch.int32 if model.has_small_ids else torch.int64

    def features(tables: Iterable[DrawnTable], weighted: bool) -> KeyedJaggedTensor:
        rows: dict[str, int] = {}
        for table in tables:
            for feature in table.features:
                rows[feature] = min(table.rows, rows.get(feature, table.rows))
        lengths = torch.randint(0, 7, (len(rows) * size,), generator=generator)
        counts = lengths.view(len(rows), size).sum(1).tolist()
        ids = [
            torch.randint(0, rows[key], (n,), generator=generator)
            for key, n in zip(rows, counts, strict=True)
        ]
        weights = torch.rand(sum(counts), generator=generator) if weighted else None
        return _jagged(model, list(rows), torch.cat(ids).to(kind), lengths.to(kind), weights)

    return ModelInput(
        float_features=torch.rand(size, NUM_FLOATS, generator=generator),
        idlist_features=features(model.tables, False),
        idscore_features=features(model.weighted_tables, True) if model.weighted_tables else None,
        label=torch.rand(size, generator=generator),
    )


def _jagged(
    model: DrawnModel, keys: list[str], ids: Tensor, lengths: Tensor, weights: Tensor | None
) -> KeyedJaggedTensor:
    if not model.has_offsets:
        return KeyedJaggedTensor(keys, ids, weights=weights, lengths=lengths)
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(lengths.dtype)])
    return KeyedJaggedTensor(keys, ids, weights=weights, offsets=offsets)


def joined(model: DrawnModel, batches: list[ModelInput]) -> ModelInput:
    """Return the global batch of the ranks' batches."""

    def features(parts: list[Any]) -> KeyedJaggedTensor | None:
        if parts[0] is None:
            return None
        keys = parts[0].keys()
        bags = [part[key] for key in keys for part in parts]
        weights = [bag.weights() for bag in bags] if parts[0].weights_or_none() is not None else []
        return _jagged(
            model,
            keys,
            torch.cat([bag.values() for bag in bags]),
            torch.cat([bag.lengths().to(parts[0].lengths().dtype) for bag in bags]),
            torch.cat(weights) if weights else None,
        )

    return ModelInput(
        float_features=torch.cat([batch.float_features for batch in batches]),
        idlist_features=features([batch.idlist_features for batch in batches]),
        idscore_features=features([batch.idscore_features for batch in batches]),
        label=torch.cat([batch.label for batch in batches]),
    )


def train_in_one_process(drawn: DrawnModel, num_ranks: int) -> TorchRecModel:
    """Return the model, trained by a plain loop over the global batches."""
    model = TorchRecModel(drawn)
    configured = model.configure_optimizers()
    for batches in batches_of(drawn, num_ranks):
        loss = model.net(joined(drawn, batches))[0]
        model.losses.append(float(loss.detach()))
        step_all(configured, loss, Tensor.backward)
    model.final_state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    return model
