"""Batches of unequal sizes, in any form, and inputs that are made of them: trained as in one
process."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor
from torchrec.inference.modules import quantize_embeddings, quantize_inference_model

from tests.support.cases import Case, check, check_refused, click_case
from tests.support.click_model import (
    FEATURES,
    ClickModel,
    SequenceModel,
    join_batches,
    make_batch,
    rank_loader,
    seeded,
)
from tests.support.plain_loop import EVERY_CUT, OPTIMIZERS
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

ENDS = {2: [0, 3, 12], 3: [0, 1, 5, 12], 4: [0, 1, 3, 6, 12]}


def share(num_ranks: int, step: int, rank: int) -> dict[str, Tensor]:
    """Return this rank's share of one global batch of 24 examples."""
    parts = range(*ENDS[num_ranks][rank : rank + 2])
    return join_batches([make_batch(1000 * step + part, size=2) for part in parts])


class SumOfLosses(ClickModel):
    """Returns the sum over its batch, scaled so that steps stay small."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        losses = nn.functional.binary_cross_entropy_with_logits(
            self(batch), batch["label"], reduction="sum"
        )
        return losses / 24


class LooksUpCandidates(ClickModel):
    """Looks up a second time with twice the examples, and so in the same proportion on all
    ranks."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        twice = join_batches([batch, batch])
        candidates = super().forward(twice).view(2, -1)
        return super().forward(batch) + 0.1 * candidates[0]


def shared_bags(batch: dict[str, Tensor], form: str, step: int = 0) -> KeyedJaggedTensor:
    """Return the features of a batch of which two examples share a bag of feature a, in one of
    several forms."""
    size = len(batch["label"])
    lengths = list(batch["lengths"].split(size))
    ids = list(batch["ids"].split([int(part.sum()) for part in lengths]))
    inverse = torch.arange(size).repeat(len(FEATURES), 1)
    inverse[0] = inverse[0] // 2
    keys, order, equal = FEATURES, FEATURES, form == "equal batch sizes"
    if form == "changing order":
        # torchrec remembers the order of its first call.
        order = FEATURES[::-1] if step % 2 else FEATURES[2:] + FEATURES[:2]
        keys = [*FEATURES[1:], "a"] if step % 3 else FEATURES
    if form == "changing form" and step % 2 == 0:
        return KeyedJaggedTensor(FEATURES, batch["ids"], lengths=batch["lengths"])
    if not equal:
        lengths[0] = lengths[0][: size // 2]
        ids[0] = ids[0][: int(lengths[0].sum())]
    places = [FEATURES.index(key) for key in keys]
    rows = inverse[[FEATURES.index(key) for key in order]]
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([ids[place] for place in places]),
        lengths=torch.cat([lengths[place] for place in places]),
        stride_per_key_per_rank=None if equal else [[len(lengths[place])] for place in places],
        inverse_indices=None if form == "none" else (order, rows),
    )


class SharesBags(ClickModel):
    """Looks up bags that examples share. change: how rank 1 spoils the inverse indices."""

    def __init__(self, *args: Any, form: str, change: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self.form, self.change, self.step = form, change, 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.step = batch_idx
        return super().training_step(batch, batch_idx)

    def features(self, batch: dict[str, Tensor]) -> KeyedJaggedTensor:
        """Return what is looked up."""
        features = shared_bags(batch, self.form, self.step)
        if not self.change or rank_and_num_ranks()[0] == 0:
            return features
        names, indices = features.inverse_indices()
        changed = {"beyond": (names, indices + 1), "missing": (names[1:], indices[1:])}
        return KeyedJaggedTensor(
            keys=features.keys(),
            values=features.values(),
            lengths=features.lengths(),
            stride_per_key_per_rank=features.stride_per_key_per_rank(),
            inverse_indices=changed.get(self.change),
        )

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.mlp(self.ebc(self.features(batch)).values()).squeeze(-1)


class SharesRows(SharesBags, SequenceModel):
    """Looks up rows of such bags: unsharded, inverse indices do not count here."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        rows = self.ebc(self.features(batch))
        sums = [rows[name].values().sum(0) * rows[name].lengths().max() for name in FEATURES]
        score = self.mlp(self.first(torch.cat(sums)[None] / 10))
        return score.expand(len(batch["label"]), 1).squeeze(-1)


class InBatch(ClickModel):
    """Its batches have what it looks up, made when they are transferred.

    kind: "negatives" looks up others made of their ids, "permuted" in two orders and a part,
    "nested" has a TensorDict of nested tensors.
    """

    def __init__(self, *args: Any, kind: str) -> None:
        self.kind = kind
        super().__init__(*args)

    def _build(self) -> None:
        super()._build()
        if self.kind == "permuted":
            self.part = EmbeddingBagCollection([copy.deepcopy(self.ebc.embedding_bag_configs()[1])])

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        features: Any = KeyedJaggedTensor(FEATURES, batch["ids"], lengths=batch["lengths"])
        if self.kind == "nested":
            nest = torch.nested.nested_tensor_from_jagged
            nested = {
                key: nest(jagged.values(), offsets=jagged.offsets())
                for key, jagged in features.to_dict().items()
            }
            features = TensorDict(nested, batch_size=[len(batch["label"])])
        return batch | {"features": features}

    def forward(self, batch: dict[str, Any]) -> Tensor:
        features = batch["features"]
        bags = self.ebc(features).values()
        if self.kind == "negatives":
            ids = (features.values() * 7 + 1) % 11
            others = KeyedJaggedTensor(features.keys(), ids, lengths=features.lengths())
            bags = bags - self.ebc(others).values()
        if self.kind == "permuted":
            part = self.part(features.split([2, 1, 1])[1]).values().repeat(1, 7)
            bags = bags * self.ebc(features.permute([3, 1, 0, 2])).values() + part
        return self.mlp(bags).squeeze(-1)


class Nested(InBatch):
    """The same, which one process looks up as a KeyedJaggedTensor."""

    def forward(self, batch: dict[str, Any]) -> Tensor:
        features = KeyedJaggedTensor(FEATURES, batch["ids"], lengths=batch["lengths"])
        return super().forward(batch | {"features": features})


def unequal(kind: type, optimizer: str, num_ranks: int = 3, **values: Any) -> Case:
    """Return a case of the same global batches, whatever the number of ranks."""
    fields = {"num_ranks": num_ranks, "batch": partial(share, num_ranks), "loss_limit": None}
    return click_case(kind, optimizer, **fields | values)


def shared(kind: type, form: str, cut: str, optimizer: str, **values: Any) -> Case:
    # A step that calls with another form than the first one cannot be prefetched.
    strategy = CUTS[cut] | {"prefetch": {"depth": 1}}
    return click_case(
        kind, optimizer, **{"form": form, "strategy": strategy, "steps": 5, "join": None} | values
    )


CUTS: dict[str, dict[str, Any]] = {
    **{cut: {"sharding_types": [cut]} for cut in ("table_wise", "row_wise")},
    "every": EVERY_CUT,
    "sparse": {"embedding_update": "sparse"},
}
UNEQUAL, EQUAL = "unequal batch sizes", "equal batch sizes"
PLAIN_NESTED = partial(Nested, *OPTIMIZERS["SGD"], kind="nested")
CASES = {
    "unequal, ids ignored": unequal(ClickModel, "Adam", strategy={"check_ids": "ignore"}),
    "unequal, sparse": unequal(SequenceModel, "Adagrad", strategy=CUTS["sparse"]),
    "unequal candidates": unequal(LooksUpCandidates, "SGD"),
    "unequal sums": unequal(SumOfLosses, "SGD", 4, strategy={"loss_reduction": "sum"}),
    "means of ranks": unequal(
        ClickModel, "SGD", 2, strategy={"loss_reduction": "rank_mean"}, join=None, loss_limit=1e-5
    ),
    "shared, sparse": shared(SharesBags, UNEQUAL, "sparse", "SGD"),
    "shared, RowWiseAdagrad": shared(
        SharesBags, UNEQUAL, "table_wise", "RowWiseAdagrad", pooling="mean"
    ),
    "shared, every cut": shared(SharesBags, UNEQUAL, "every", "Adam", pooling="mean"),
    "shared, equal": shared(SharesBags, EQUAL, "table_wise", "Adagrad"),
    "shared, changing form": shared(SharesBags, "changing form", "table_wise", "SGD"),
    "shared, changing order": shared(SharesBags, "changing order", "row_wise", "SGD"),
    "shared rows without indices": shared(SharesRows, "none", "row_wise", "Adagrad"),
    "shared rows, changing form": shared(SharesRows, "changing form", "row_wise", "Adagrad"),
    "negatives": click_case(InBatch, kind="negatives", strategy=CUTS["row_wise"]),
    "permuted": click_case(InBatch, kind="permuted", strategy=CUTS["table_wise"]),
    "nested": click_case(InBatch, kind="nested", strategy=CUTS["row_wise"], plain=PLAIN_NESTED),
}


@pytest.mark.parametrize("name", CASES)
def test_batches_of_any_form_train_as_in_one_process(name: str) -> None:
    check(CASES[name])


def wrong(change: str) -> Case:
    return click_case(SharesBags, form=UNEQUAL, change=change, steps=5)


REFUSED = {
    "none": (wrong("none"), "IdsError: 'ebc' was called with unequal batch sizes per feature, [4,"),
    "beyond": (wrong("beyond"), "inverse_indices beyond the batch sizes [4, 8, 8, 8]"),
    "missing": (wrong("missing"), "inverse_indices that lack the features ['a']"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_inverse_indices_that_do_not_fit_on_one_rank_end_all_ranks(name: str) -> None:
    check_refused(*REFUSED[name])


def _quantized() -> list[str]:
    model = seeded(ClickModel, *OPTIMIZERS["SGD"])
    trainer = make_trainer()
    trainer.fit(model, rank_loader(1, rank_and_num_ranks()[0]))
    messages = []
    for quantize in (
        lambda: quantize_embeddings(model, torch.qint8, inplace=True),
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


def test_a_sharded_module_is_not_quantized_without_a_word() -> None:
    for first, second, *kinds in run_on_warm_ranks(_quantized, 2):
        for message in (first, second):
            assert message.startswith(
                "ShardingError: a sharded module cannot be quantized: this rank has only shards"
            )
            assert "trainer.strategy.unshard()" in message
        assert kinds == ["torchrec.modules.embedding_modules", "torchrec.quant.embedding_modules"]
