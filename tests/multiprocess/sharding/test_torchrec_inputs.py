"""Inputs of TorchRec's own models: a KeyedJaggedTensor and others made of it, a TensorDict; and its
quantization."""

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.inference.modules import quantize_embeddings, quantize_inference_model
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from tests.support.click_model import (
    FEATURES,
    ClickModel,
    largest_difference,
    rank_loader,
    seeded,
    train_unsharded,
)
from tests.support.plain_loop import limit_of
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import make_trainer

STEPS = 6
SGD = (torch.optim.SGD, {"lr": 0.5})


class InBatch(ClickModel):
    """Its batches have what it looks up, made when they are transferred."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch | {"features": self.features(batch)}

    def features(self, batch: dict[str, Tensor]) -> Any:
        """Return what a batch has."""
        return KeyedJaggedTensor(FEATURES, batch["ids"], lengths=batch["lengths"])

    def looked_up(self, batch: dict[str, Any]) -> Tensor:
        """Return the bags."""
        return self.ebc(batch["features"]).values()

    def forward(self, batch: dict[str, Any]) -> Tensor:
        if "features" not in batch:  # in one process
            batch = batch | {"features": self.features(batch)}
        return self.mlp(self.looked_up(batch)).squeeze(-1)


class Negatives(InBatch):
    """Looks up the batch's features whole, and others made of their ids."""

    def looked_up(self, batch: dict[str, Any]) -> Tensor:
        features = batch["features"]
        others = KeyedJaggedTensor(
            features.keys(), (features.values() * 7 + 1) % 11, lengths=features.lengths()
        )
        return super().looked_up(batch) - self.ebc(others).values()


class Permuted(InBatch):
    """Looks up the batch's features in two orders, and a part of them."""

    def _build(self) -> None:
        super()._build()
        self.part = EmbeddingBagCollection([copy.deepcopy(self.ebc.embedding_bag_configs()[1])])

    def looked_up(self, batch: dict[str, Any]) -> Tensor:
        features = batch["features"]
        permuted = features.permute([3, 1, 0, 2])
        part = self.part(features.split([2, 1, 1])[1]).values().repeat(1, 7)
        return super().looked_up(batch) * self.ebc(permuted).values() + part


class InTensorDict(InBatch):
    """Its batches have nested tensors."""

    def features(self, batch: dict[str, Tensor]) -> Any:
        size = len(batch["label"])
        features = KeyedJaggedTensor(FEATURES, batch["ids"], lengths=batch["lengths"]).to_dict()
        nested = {
            key: torch.nested.nested_tensor_from_jagged(jagged.values(), offsets=jagged.offsets())
            for key, jagged in features.items()
        }
        return TensorDict(nested, batch_size=[size])


KINDS: list[type[InBatch]] = [Negatives, Permuted, InTensorDict]


def _train(kind: type[InBatch], cut: str) -> dict[str, Tensor]:
    model = seeded(kind, *SGD)
    make_trainer({"sharding_types": [cut]}).fit(model, rank_loader(STEPS, rank_and_num_ranks()[0]))
    return model.final_state


@pytest.mark.parametrize("cut", ["table_wise", "row_wise"])
def test_what_is_made_of_a_batch_beside_the_whole_trains_as_in_one_process(cut: str) -> None:
    actual = run_each_on_ranks({kind.__name__: (_train, kind, cut) for kind in KINDS}, 2)[0]
    for kind in KINDS:
        start = seeded(kind, *SGD)
        expected = train_unsharded(start, STEPS, 2).final_state
        assert max(largest_difference(actual[kind.__name__], expected).values()) <= limit_of(
            "SGD"
        ), kind
        assert largest_difference(expected, start.state_dict())["tables"] > 1e-3


def _quantized(in_place: bool) -> list[str]:
    model = seeded(ClickModel, *SGD)
    trainer = make_trainer()
    trainer.fit(model, rank_loader(1, rank_and_num_ranks()[0]))
    messages = []
    for quantize in (
        lambda: quantize_embeddings(model, torch.qint8, inplace=in_place),
        lambda: quantize_inference_model(model),
    ):
        try:
            quantize()
        except Exception as error:
            messages.append(f"{type(error).__name__}: {error}")
    trainer.strategy.unshard()
    kinds = [
        type(model.ebc).__module__,
        type(quantize_embeddings(model, torch.qint8, inplace=True).ebc).__module__,
    ]
    return messages + kinds


@pytest.mark.parametrize("in_place", [True, False])
def test_a_sharded_module_is_not_quantized_without_a_word(in_place: bool) -> None:
    for first, second, *kinds in run_each_on_ranks({"one": (_quantized, in_place)}, 2)[0].values():
        for message in (first, second):
            assert message.startswith(
                "ShardingError: a sharded module cannot be quantized: this rank has only shards"
            )
            assert "trainer.strategy.unshard()" in message
        assert kinds == ["torchrec.modules.embedding_modules", "torchrec.quant.embedding_modules"]
