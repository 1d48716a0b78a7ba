"""TorchRec's own test models train on ranks what they train in one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.test_utils import test_model
from torchrec.distributed.test_utils.model_input import ModelInput

from tests.support.cases import Case, case_of, check

FEATURES, WEIGHTED = ("f0", "f1", "f2", "f3"), ("w0", "w1")
NUM_FLOATS, SIZE, ROWS = 10, 3, 40
BAGS: list[Any] = [
    EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=ROWS, feature_names=[name])
    for name in FEATURES
]
WEIGHTED_BAGS: list[Any] = [
    EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=ROWS, feature_names=[name])
    for name in WEIGHTED
]
SHARED = [
    *BAGS[:3],
    EmbeddingBagConfig(
        name="f3", embedding_dim=16, num_embeddings=ROWS, feature_names=["f3", "f0"]
    ),
]
MIXED = [
    *BAGS[:2],
    *(
        EmbeddingConfig(name=name, embedding_dim=8, num_embeddings=ROWS, feature_names=[name])
        for name in FEATURES[2:]
    ),
]
MODELS: dict[str, Callable[[], nn.Module]] = {
    "weighted": partial(test_model.TestSparseNN, BAGS, NUM_FLOATS, weighted_tables=WEIGHTED_BAGS),
    "processed": partial(test_model.TestSparseNN, BAGS, NUM_FLOATS, max_feature_lengths={"f0": 10}),
    "shared": partial(
        test_model.TestSparseNN,
        SHARED,
        NUM_FLOATS,
        embedding_groups={"all": ["f0@f0", "f1", "f2", "f3", "f0@f3"]},
    ),
    "regrouped": partial(
        test_model.TestSparseNN,
        BAGS,
        NUM_FLOATS,
        weighted_tables=WEIGHTED_BAGS,
        over_arch_clazz=test_model.TestOverArchRegroupModule,
    ),
    "tower": partial(test_model.TestTowerSparseNN, BAGS, NUM_FLOATS, WEIGHTED_BAGS),
    "towers": partial(test_model.TestTowerCollectionSparseNN, BAGS, NUM_FLOATS, WEIGHTED_BAGS),
    "mixed": partial(test_model.TestMixedEmbeddingSparseArch, MIXED, NUM_FLOATS),
}


class TorchRecModel(pl.LightningModule):
    """One of TorchRec's models. in_backward: tables that have an optimizer of their own."""

    def __init__(self, kind: str, in_backward: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.net = MODELS[kind]()
        for name, weight in self.named_parameters():
            if any(f".{table}." in name for table in in_backward):
                _apply_optimizer_in_backward(optim.Adam, [weight], {"lr": 1e-3, "eps": 1e-6})

    def training_step(self, batch: ModelInput, batch_idx: int) -> Tensor:
        return self.net(batch)[0]

    def configure_optimizers(self) -> Any:
        weights = [w for w in self.parameters() if not hasattr(w, "_in_backward_optimizers")]
        return optim.Adagrad(weights, lr=0.02, eps=1e-5)


def batch_of(step: int, rank: int) -> ModelInput:
    draw = torch.Generator().manual_seed(100 * step + rank)

    def features(keys: tuple[str, ...], is_weighted: bool) -> KeyedJaggedTensor:
        lengths = torch.randint(0, 7, (len(keys) * SIZE,), generator=draw)
        ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=draw)
        weights = torch.rand(len(ids), generator=draw) if is_weighted else None
        return KeyedJaggedTensor(list(keys), ids, weights=weights, lengths=lengths)

    return ModelInput(
        float_features=torch.rand(SIZE, NUM_FLOATS, generator=draw),
        idlist_features=features(FEATURES, False),
        idscore_features=features(WEIGHTED, True),
        label=torch.rand(SIZE, generator=draw),
    )


def join(batches: list[ModelInput]) -> ModelInput:
    def features(parts: list[Any]) -> KeyedJaggedTensor:
        keys = parts[0].keys()
        bags = [part[key] for key in keys for part in parts]
        weighted = parts[0].weights_or_none() is not None
        return KeyedJaggedTensor(
            keys,
            torch.cat([bag.values() for bag in bags]),
            weights=torch.cat([bag.weights() for bag in bags]) if weighted else None,
            lengths=torch.cat([bag.lengths() for bag in bags]),
        )

    return ModelInput(
        float_features=torch.cat([batch.float_features for batch in batches]),
        idlist_features=features([batch.idlist_features for batch in batches]),
        idscore_features=features([batch.idscore_features for batch in batches]),
        label=torch.cat([batch.label for batch in batches]),
    )


def case(kind: str, cuts: dict[str, str], **values: Any) -> Case:
    """Return a case of a model. TorchRec's over archs do not use all layers."""
    tables = {table: {"sharding_types": [cut]} for table, cut in cuts.items()}
    strategy = {"tables": tables, "find_unused_parameters": True}
    fields = {"batch": batch_of, "join": join, "limit": 1e-5, "rests": ("dummy_param",)}
    return case_of(TorchRecModel, kind, strategy=strategy, **fields, **values)


REPLICATED = {"f0": "data_parallel", "f1": "data_parallel", "f2": "row_wise"}
CASES = {
    "weighted": case("weighted", {"f0": "row_wise", "w0": "row_wise"}),
    "processed": case("processed", {"f0": "row_wise", "f1": "column_wise"}),
    "shared, in backward": case("shared", {"f3": "row_wise"}, in_backward=("f0", "f3")),
    "regrouped, one gradient of two": case("regrouped", REPLICATED, in_backward=("f0", "f2")),
    "tower": case("tower", {}),
    "towers, in backward": case("towers", {}, in_backward=("f0", "w0")),
    "mixed": case("mixed", {"f0": "row_wise", "f3": "row_wise"}),
}


@pytest.mark.parametrize("name", CASES)
def test_torchrecs_models_train_as_in_one_process(name: str) -> None:
    check(CASES[name])
