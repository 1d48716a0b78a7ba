"""Tables of any kind, and whatever is said about single ones, train as in one process, or are
refused by name."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
)

from lightning_distrec import (
    PrefetchOptions,
    TableOptions,
)
from lightning_distrec.errors import ShardedWeightError
from lightning_distrec.sharding.sharded_tables import sharded_tables_of
from tests.support.cases import Case, case_of, check, check_refused, click_case, run_case
from tests.support.click_model import FEATURES, ClickModel, seeded
from tests.support.embedding_models import TwoTower, loader, pairs, sequences
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks
from tests.support.tied_models import LightGCN, TiedSASRec
from tests.support.trainers import make_trainer

SGD = (torch.optim.SGD, {"lr": 0.5})
ADAM = (torch.optim.Adam, {"lr": 0.003, "eps": 1e-3})


def _config(name: str, dim: int, feature: str) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, embedding_dim=dim, num_embeddings=60, feature_names=[feature]
    )


class OddDims(ClickModel):
    """Looks up tables of dims 10, and of 16 and 6 in one collection, beside the click model's."""

    def __init__(self) -> None:
        super().__init__(*SGD)
        self.bags = EmbeddingBagCollection(tables=[_config("ten", 10, "a")])
        mixed = [_config("even", 16, "b"), _config("six", 6, "c")]
        self.mixed = EmbeddingBagCollection(tables=mixed)
        self.head = nn.Linear(32, 1, bias=False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        odd = torch.cat([self.bags(features).values(), self.mixed(features).values()], 1)
        return super().forward(batch) + self.head(odd).squeeze(-1)


class OnlyOdd(ClickModel):
    """Builds its odd table in configure_model, and has no others."""

    def __init__(self) -> None:
        super().__init__(*SGD, meta=True)
        self.bags: Any = None

    def configure_model(self) -> None:
        if self.bags is None:
            torch.manual_seed(3)
            self.bags = EmbeddingBagCollection(tables=[_config("ten", 10, "a")])

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        return self.bags(features).values().sum(1) + 0 * self.mlp(torch.zeros(56)).sum()


class Mixed(ClickModel):
    """Tables of one collection, of another one, and plain ones. on_meta: the other collection is
    built without memory, and the module itself has options for it."""

    def __init__(self, on_meta: bool = False) -> None:
        super().__init__(*ADAM)
        self.shipped: dict[str, Any] = {}
        self.replicated: Any = None
        if not on_meta:
            self.build_replicated()
        else:
            narrow = {"sharding_types": ["row_wise"]}
            self.shipped = {"replicated.t": {"replicated": True}, "narrow": narrow}
        self.replicated_rows, self.own_rows = nn.Embedding(12, 8), nn.Embedding(12, 8)

    def build_replicated(self) -> None:
        self.replicated = EmbeddingBagCollection(tables=[_config("t", 8, "a")])

    def configure_model(self) -> None:
        if self.replicated is None:
            self.build_replicated()

    def table_options(self) -> dict[str, Any]:
        return self.shipped

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        ids = batch["lengths"].view(len(FEATURES), -1)[0]
        rows = self.replicated(features).values() + self.replicated_rows(ids) * self.own_rows(ids)
        return super().forward(batch) + 0.3 * rows.sum(-1)


def keep_own_rows_whole(model: Any) -> None:
    model.shipped = {"own_*": {"replicated": True}}


def cuts(trainer: Any) -> Any:
    model = trainer.lightning_module
    tables = sharded_tables_of(model)
    assert tables is not None
    kinds = [type(model.replicated).__name__, type(model.replicated_rows).__name__]
    return {name: sharding.sharding_type for name, sharding in tables.plan.items()}, kinds


class Keeps(ClickModel):
    """Takes the tables' weights out of a list: for the optimizer, and for a penalty."""

    def _build(self) -> None:
        super()._build()
        bags: Any = self.ebc.embedding_bags
        self.kept = {"tables": [bag.weight for bag in bags.values()]}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        penalty = 0.01 * self.kept["tables"][0].square().sum()
        return super().training_step(batch, batch_idx) + penalty

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.kept["tables"], "lr": 0.05}, {"params": self.mlp.parameters()}]
        return self.optimizer(groups, **self.options)


class WithNumbers(TwoTower):
    """Has a collection too; its numbers of rows and columns are numpy's."""

    def __init__(self) -> None:
        number = np.int64
        super().__init__(number(50), number(70), number(16))
        table = EmbeddingBagConfig(
            name="t", embedding_dim=number(8), num_embeddings=number(50), feature_names=["f"]
        )
        self.bags = EmbeddingBagCollection(tables=[table])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features = KeyedJaggedTensor(["f"], batch[0], lengths=torch.ones_like(batch[0]))
        squares = self.bags(features).values().square().mean()
        return super().training_step(batch, batch_idx) + squares

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.05)


def options_in_numbers() -> dict[str, Any]:
    number = np.int64
    by_rows = {"sharding_types": ["row_wise"], "pooling_factor": number(1)}
    tables = {
        "item_embedding": TableOptions(min_partition=number(8)),
        "user_embedding": by_rows,
    }
    return {
        "min_rows": number(10),
        "batch_size_per_rank": number(12),
        "memory_bytes_per_rank": number(10**9),
        "bucket_cap_mb": number(25),
        "prefetch": PrefetchOptions(depth=number(2)),
        "tables": tables,
    }


def tied(kind: type, batch: Any, cut: str, depth: int, **values: Any) -> Case:
    """Return a case of a model that reads whole weights, which are gathered."""
    convert = ["item_embedding"] if kind is TiedSASRec else "all"
    strategy = {
        "convert_embeddings": convert,
        "sharding_types": [cut],
        "tables": {"*": {"gathered_weight": True}},
        "prefetch": {"depth": depth},
    }
    fields = {"strategy": strategy, "val_steps": 1, "predicts": True, "steps": 4, "limit": 1e-5}
    return case_of(kind, batch=batch, **fields | values)


def keeps_after_unshard(trainer: Any) -> None:
    trainer.strategy.unshard()
    model = trainer.lightning_module
    kept = zip(model.ebc.embedding_bags.values(), model.kept["tables"], strict=True)
    assert all(bag.weight is weight for bag, weight in kept)


def left_whole() -> Case:
    """Return a case of a model whose item table stays whole, since its weight is read."""
    words = "'item_embedding' is not sharded, every rank has all of it: its weight is read in Tied"
    told = (words, "{'gathered_weight': True}")
    fields = {"batch": sequences, "steps": 4, "limit": 1e-5, "told": told}
    return case_of(TiedSASRec, strategy={"convert_embeddings": "all"}, **fields)


BY_ROWS = {"sharding_types": ["row_wise"]}
WHOLE = {"replicated": True}
KEPT: dict[str, Any] = {
    "convert_embeddings": "all",
    "tables": {
        "ebc.*": BY_ROWS | {"compute_kernels": ["fused"]},
        "narrow": WHOLE,
        "replicated*": WHOLE,
    },
}
COLUMNS = "but FBGEMM's rows come in multiples of 4 columns, so that only embedding_dim"
NOT_SHARDED = "is not sharded, every rank has all of it: table"
ODD = (
    f"'bags' {NOT_SHARDED} 'ten' has embedding_dim=10, {COLUMNS}=12 would be sharded.",
    f"'mixed' {NOT_SHARDED} 'six' has embedding_dim=6, {COLUMNS}=8 would be sharded.",
)
SEQUENCES, GRAPH = (TiedSASRec, sequences), (LightGCN, pairs)
CASES = {
    "odd dims": case_of(
        OddDims, strategy={"tables": {"*": BY_ROWS, "bags.ten": WHOLE}}, told=ODD, updates="fused"
    ),
    "only odd dims": case_of(OnlyOdd, steps=4, rests=("mlp",)),
    "some kept whole": case_of(Mixed, strategy=KEPT, fits=2, limit=1e-5, look=cuts),
    "kept in a list": click_case(
        Keeps,
        fits=2,
        strategy=BY_ROWS | {"embedding_update": "dense"},
        limit=1e-5,
        look=keeps_after_unshard,
    ),
    "gathered": tied(*SEQUENCES, "row_wise", 3),
    "gathered graph, columns": tied(*GRAPH, "column_wise", 1),
    "read and left whole": left_whole(),
}


@pytest.mark.parametrize("name", CASES)
def test_tables_train_as_in_one_process(name: str) -> None:
    outcomes = check(CASES[name])
    if name == "some kept whole":
        types = {"ebc.wide": "row_wise", "ebc.narrow": "data_parallel", "ebc.shared": "row_wise"}
        for outcome in outcomes:
            plan, kinds = outcome.seen
            assert {key: plan[key] for key in types} == types
            assert kinds == ["EmbeddingBagCollection", "Embedding"]


def odd(name: str) -> Case:
    return case_of(OddDims, strategy={"tables": {name: BY_ROWS}}, steps=1)


REFUSED: dict[str, tuple[Case, str]] = {
    "odd": (
        odd("bags.ten"),
        "ShardingError: tables['bags.ten']: 'bags.ten' cannot be sharded: table 'ten' has",
    ),
    "beside an odd one": (odd("even"), "'mixed.even' cannot be sharded: table 'six' has"),
    "sharded before": (
        case_of(Mixed, strategy=KEPT, fits=2, between=keep_own_rows_whole),
        "'own_rows' was sharded in an earlier run",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_table_cannot_be_is_refused_on_every_rank(name: str) -> None:
    check_refused(*REFUSED[name])


def _fit_a_named_table() -> list[str]:
    trainer = make_trainer({"convert_embeddings": ["item_embedding"]})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ShardedWeightError, match="gathered_weight"):
            trainer.fit(seeded(TiedSASRec), loader([sequences(0, rank_and_num_ranks()[0])]))
    return [str(warning.message) for warning in caught]


def test_a_named_table_whose_weight_is_read_is_named_before_the_step_that_raises() -> None:
    messages, _ = run_on_warm_ranks(_fit_a_named_table, 2)
    words = "the weight of table 'item_embedding' is read in TiedSASRec"
    assert any(words in message for message in messages), messages


def test_a_collection_that_is_kept_whole_has_its_rows_from_configure_model() -> None:
    by_tables = {"narrow": {"sharding_types": ["table_wise"]}}
    strategy = {"convert_embeddings": "all", "tables": by_tables}
    outcomes = run_case(case_of(Mixed, on_meta=True, strategy=strategy, look=cuts, steps=1))
    words = "table_options() of 'Mixed' has options of replicated.t, narrow"
    assert any(words in line for line in outcomes[0].lines)
    # The strategy's options override those that a module ships.
    assert outcomes[0].seen[0]["ebc.narrow"] == "table_wise"
    first, second = (outcome.state["replicated.embedding_bags.t.weight"] for outcome in outcomes)
    assert torch.equal(first, second)
    # torchrec draws them uniformly, up to one by the root of the number of rows; one step moves
    # them a little.
    assert 0.01 < float(first.std()) < 0.5
    assert len(first.unique()) > 400


def test_numbers_of_numpy_are_numbers_and_a_checkpoint_is_plain(tmp_path: Any) -> None:
    fields = {"batch": pairs, "steps": 3, "limit": 1e-5, "look": _save}
    fields |= {"strategy": options_in_numbers(), "trainer": {"default_root_dir": str(tmp_path)}}
    outcome = check(case_of(WithNumbers, **fields))[0]
    saved = torch.load(tmp_path / "it.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], value) for name, value in outcome.state.items())
    assert torch.equal(outcome.seen, saved["item_embedding.weight"][3:40])


def _save(trainer: Any) -> Tensor:
    trainer.save_checkpoint(f"{trainer.default_root_dir}/it.ckpt")
    return trainer.strategy.full_parameter("item_embedding", rows=(np.int64(3), np.int64(40)))
