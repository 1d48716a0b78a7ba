"""KeyedJaggedTensors whose features share bags by inverse indices, in batches of unequal size:
exact, or told."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor

from tests.support.click_model import (
    FEATURES,
    ClickModel,
    SequenceModel,
    largest_difference,
    rank_loader,
    seeded,
)
from tests.support.embedding_models import train_unsharded
from tests.support.plain_loop import EVERY_CUT, OPTIMIZERS, limit_of
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.trainers import make_trainer

STEPS = 5


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
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.cat([ids[place] for place in places]),
        lengths=torch.cat([lengths[place] for place in places]),
        stride_per_key_per_rank=None if equal else [[len(lengths[place])] for place in places],
        inverse_indices=None
        if form == "none"
        else (order, inverse[[FEATURES.index(key) for key in order]]),
    )


class SharesBags(ClickModel):
    """Looks up bags that examples share."""

    form = ""
    step = 0

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.step = batch_idx
        return super().training_step(batch, batch_idx)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.mlp(self.ebc(shared_bags(batch, self.form, self.step)).values()).squeeze(-1)


class SharesRows(SharesBags, SequenceModel):
    """Looks up rows of such bags: unsharded, inverse indices do not count here."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        rows = self.ebc(shared_bags(batch, self.form, self.step))
        sums = [rows[name].values().sum(0) * rows[name].lengths().max() for name in FEATURES]
        return (
            self
            .mlp(self.first(torch.cat(sums)[None] / 10))
            .expand(len(batch["label"]), 1)
            .squeeze(-1)
        )


CUTS: dict[str, dict[str, Any]] = {
    **{cut: {"sharding_types": [cut]} for cut in ("table_wise", "row_wise", "data_parallel")},
    "column_wise": {"sharding_types": ["column_wise"], "tables": {"*": {"min_partition": 4}}},
    "every": EVERY_CUT,
    "sparse": {"embedding_update": "sparse"},
}
CASES = [
    *[
        (SharesBags, "unequal batch sizes", cut, "SGD", "sum")
        for cut in ("column_wise", "data_parallel", "sparse")
    ],
    *[
        (SharesBags, "unequal batch sizes", "row_wise", name, "mean")
        for name in ("Adagrad", "RowWiseAdagrad")
    ],
    (SharesBags, "unequal batch sizes", "table_wise", "RowWiseAdagrad", "mean"),
    (SharesBags, "unequal batch sizes", "every", "Adam", "mean"),
    *[(SharesBags, "equal batch sizes", "table_wise", name, "sum") for name in ("SGD", "Adagrad")],
    *[(SharesBags, "changing form", "table_wise", name, "mean") for name in ("SGD", "Adagrad")],
    *[(SharesBags, "changing order", cut, "SGD", "mean") for cut in ("table_wise", "row_wise")],
    *[
        (SharesRows, form, "row_wise", "Adagrad", "sum")
        for form in ("unequal batch sizes", "none", "changing form")
    ],
    (SharesRows, "unequal batch sizes", "table_wise", "SGD", "sum"),
]


def _model(kind: Any, form: str, name: str, pooling: str) -> ClickModel:
    model = seeded(kind, *OPTIMIZERS[name], pooling)
    model.form = form
    return model


def _train(kind: Any, form: str, cut: str, name: str, pooling: str) -> dict[str, Tensor]:
    model = _model(kind, form, name, pooling)
    # A step that calls with another form than the first one cannot be prefetched.
    make_trainer(CUTS[cut] | {"prefetch": {"depth": 1}}).fit(
        model, rank_loader(STEPS, rank_and_num_ranks()[0])
    )
    return model.final_state


def test_bags_that_examples_share_train_the_tables_as_in_one_process() -> None:
    actual = run_each_on_ranks({str(case): (_train, *case) for case in CASES}, 2)[0]
    batches = list(map(list, zip(*[rank_loader(STEPS, rank) for rank in range(2)], strict=True)))
    for kind, form, cut, name, pooling in CASES:
        start = _model(kind, form, name, pooling)
        expected = train_unsharded(start, batches).state_dict()
        differences = largest_difference(actual[str((kind, form, cut, name, pooling))], expected)
        assert max(differences.values()) <= limit_of(name), (
            kind,
            form,
            cut,
            name,
            pooling,
            differences,
        )
        assert largest_difference(expected, start.state_dict())["tables"] > 1e-3


class GivesWrongIndices(SharesBags):
    """Spoils the inverse indices on rank 1."""

    change = ""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = shared_bags(batch, self.form)
        names, indices = features.inverse_indices()
        inverse = {
            "none": None,
            "beyond": (names, indices + 1),
            "missing": (names[1:], indices[1:]),
        }[self.change]
        if rank_and_num_ranks()[0] == 1:
            features = KeyedJaggedTensor(
                keys=features.keys(),
                values=features.values(),
                lengths=features.lengths(),
                stride_per_key_per_rank=features.stride_per_key_per_rank(),
                inverse_indices=inverse,
            )
        return self.mlp(self.ebc(features).values()).squeeze(-1)


def _train_wrong(change: str) -> None:
    model = _model(GivesWrongIndices, "unequal batch sizes", "SGD", "sum")
    model.change = change
    make_trainer().fit(model, rank_loader(STEPS, rank_and_num_ranks()[0]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("none", r"unequal batch sizes per feature, \[4, 8, 8, 8\] for .*, and no inverse_indices"),
        ("beyond", r"inverse_indices beyond the batch sizes \[4, 8, 8, 8\]"),
        ("missing", r"inverse_indices that lack the features \['a'\]"),
    ],
)
def test_inverse_indices_that_do_not_fit_on_one_rank_end_all_ranks(
    change: str, message: str
) -> None:
    with pytest.raises(
        RankFailed,
        match=f"(?s)IdsError: 'ebc' was called with {message}.*IdsError: 'ebc' was called",
    ):
        run_on_warm_ranks(_train_wrong, 2, change)
