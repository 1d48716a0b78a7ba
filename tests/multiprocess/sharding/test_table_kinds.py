"""Tables of any kind, and whatever is said about single ones, train as in one process, or are
refused by name."""

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)

from lightning_distrec import (
    PlanningOptions,
    PrefetchOptions,
    ShardingGroupOptions,
    TableOptions,
)
from lightning_distrec.errors import ConfigError
from lightning_distrec.sharding.sharded_tables import sharded_tables_of
from tests.support.cases import Case, case_of, check, check_refused, click_case, run_case
from tests.support.click_model import FEATURES, ClickModel, seeded, train_sharded
from tests.support.embedding_models import TwoTower, loader, pairs, sequences
from tests.support.parameters import slow_except
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_on_warm_ranks
from tests.support.tied_models import LightGCN, TiedSASRec
from tests.support.trainers import make_trainer

SGD = (torch.optim.SGD, {"lr": 0.5})
ADAM = (torch.optim.Adam, {"lr": 0.003, "eps": 1e-3})
BAGS, ROWS = EmbeddingBagConfig, EmbeddingConfig


def _config(kind: Any, name: str, dim: int, feature: str) -> Any:
    return kind(name=name, embedding_dim=dim, num_embeddings=60, feature_names=[feature])


class OddDims(ClickModel):
    """Looks up tables of dims 16, 10, and both in one collection, beside those of the click
    model."""

    def __init__(self) -> None:
        super().__init__(*SGD)
        self.bags = EmbeddingBagCollection(tables=[_config(BAGS, "ten", 10, "a")])
        mixed = [_config(BAGS, "even", 16, "b"), _config(BAGS, "six", 6, "c")]
        self.mixed = EmbeddingBagCollection(tables=mixed)
        self.rows = EmbeddingCollection(tables=[_config(ROWS, "ten", 10, "d")])
        self.head = nn.Linear(42, 1, bias=False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        rows = self.rows(features)["d"]
        owner = torch.repeat_interleave(torch.arange(len(rows.lengths())), rows.lengths())
        summed = torch.zeros(len(rows.lengths()), 10).index_add(0, owner, rows.values())
        odd = torch.cat([self.bags(features).values(), self.mixed(features).values(), summed], 1)
        return super().forward(batch) + self.head(odd).squeeze(-1)


class OnlyOdd(ClickModel):
    """Builds its odd table in configure_model, and has no others."""

    def __init__(self) -> None:
        super().__init__(*SGD, meta=True)
        self.bags: Any = None

    def configure_model(self) -> None:
        if self.bags is None:
            torch.manual_seed(3)
            self.bags = EmbeddingBagCollection(tables=[_config(BAGS, "ten", 10, "a")])

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
        self.replicated = EmbeddingBagCollection(tables=[_config(BAGS, "t", 8, "a")])

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


NUMBERS: dict[str, Any] = {"int": int, "int64": np.int64, "int32": np.int32}


class WithNumbers(TwoTower):
    """Has a collection too. kind: the name of the type of its numbers of rows and columns."""

    def __init__(self, kind: str) -> None:
        number = NUMBERS[kind]
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


def options_of(kind: str) -> dict[str, Any]:
    number = NUMBERS[kind]
    by_rows = {"sharding_types": ["row_wise"], "pooling_factor": number(1)}
    tables = {
        "item_embedding": TableOptions(min_partition=number(8)),
        "user_embedding": by_rows,
    }
    return {
        "convert_embeddings": "auto",
        "min_rows": number(10),
        "batch_size_per_rank": number(12),
        "memory_bytes_per_rank": number(10**9),
        "bucket_cap_mb": number(25),
        "timeout_seconds": number(600),
        "prefetch": PrefetchOptions(depth=number(2)),
        "planning": PlanningOptions(estimate_pooling=number(2)),
        "sharding_groups": ShardingGroupOptions(size=number(2)),
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


def left_whole(**strategy: Any) -> Case:
    """Return a case of a model whose item table stays whole, since its weight is read."""
    words = "'item_embedding' is not sharded, every rank has all of it: its weight is read in Tied"
    told = (words, "{'gathered_weight': True}")
    fields = {"batch": sequences, "steps": 4, "limit": 1e-5, "told": told}
    return case_of(TiedSASRec, strategy={"convert_embeddings": "all"} | strategy, **fields)


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
    f"'rows' {NOT_SHARDED} 'ten' has embedding_dim=10, {COLUMNS}=12 would be sharded.",
)
SEQUENCES, GRAPH = (TiedSASRec, sequences), (LightGCN, pairs)
CASES = {
    "odd dims": case_of(
        OddDims, strategy={"tables": {"*": BY_ROWS, "rows.ten": WHOLE}}, told=ODD, updates="fused"
    ),
    "only odd dims": case_of(OnlyOdd, steps=4, rests=("mlp",)),
    "some kept whole": case_of(Mixed, strategy=KEPT, fits=2, limit=1e-5, look=cuts),
    "kept in a list": click_case(
        Keeps, fits=2, strategy=BY_ROWS | {"embedding_update": "dense"}, limit=1e-5
    ),
    "gathered": tied(*SEQUENCES, "row_wise", 3),
    "gathered, columns": tied(*SEQUENCES, "column_wise", 3),
    "gathered, three ranks": tied(*SEQUENCES, "table_wise", 3, num_ranks=3),
    "gathered graph": tied(*GRAPH, "row_wise", 1),
    "gathered graph, columns": tied(*GRAPH, "column_wise", 1),
    "gathered graph, three ranks": tied(*GRAPH, "table_wise", 1, num_ranks=3),
    "read and left whole": left_whole(),
    "nothing else to shard": left_whole(tables={"position_embedding": WHOLE}),
    **{
        f"numbers of {kind}": case_of(
            WithNumbers, kind=kind, batch=pairs, strategy=options_of(kind), steps=3, limit=1e-5
        )
        for kind in NUMBERS
    },
}
THREE_RANKS = [name for name in CASES if "three ranks" in name]


@pytest.mark.parametrize("name", slow_except([n for n in CASES if n not in THREE_RANKS], CASES))
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


def mixed(**tables: Any) -> Case:
    return case_of(Mixed, strategy={"convert_embeddings": "all", "tables": tables}, steps=1)


REFUSED: dict[str, tuple[Case, str]] = {
    "odd": (
        odd("bags.ten"),
        "ShardingError: tables['bags.ten']: 'bags.ten' cannot be sharded: table 'ten' has",
    ),
    "beside an odd one": (odd("even"), "'mixed.even' cannot be sharded: table 'six' has"),
    "odd rows": (odd("ro*"), "ShardingError: tables['ro*']: 'rows.ten' cannot be sharded"),
    "unknown": (odd("seven"), "there is no table 'seven'"),
    "kernel": (
        mixed(**{"ebc.wide": {"compute_kernels": ["fused_uvm"]}}),
        "on cpu rows are in the host's memory already; allow fused",
    ),
    "cache": (
        mixed(t={"cache_load_factor": 0.2}),
        "PlanError: table 'replicated.t': cache_load_factor=0.2 is for",
    ),
    "pattern": (mixed(**{"ebd.*": WHOLE}), "no table fits 'ebd.*'"),
    "sharded before": (
        case_of(Mixed, strategy=KEPT, fits=2, between=keep_own_rows_whole),
        "'own_rows' was sharded in an earlier run",
    ),
    "read": (
        case_of(TiedSASRec, batch=sequences, strategy={"convert_embeddings": ["item_embedding"]}),
        "Error: the weight of the sharded table 'item_embedding' was read",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_table_cannot_be_is_refused_on_every_rank(name: str) -> None:
    check_refused(*REFUSED[name])


def _raises_warnings() -> None:
    model = seeded(TiedSASRec)
    trainer = make_trainer({"convert_embeddings": ["item_embedding"]})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the weight of table")
        trainer.fit(model, loader([sequences(0, rank_and_num_ranks()[0])]))


def test_a_named_table_whose_weight_is_read_is_named_before_the_step_that_raises() -> None:
    message = "UserWarning: the weight of table 'item_embedding' is read in TiedSASRec"
    with pytest.raises(RankFailed, match=message):
        run_on_warm_ranks(_raises_warnings, 2)


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


def _keeps_after_unshard() -> bool:
    model = seeded(Keeps, *SGD)
    _, trainer = train_sharded(model, 1, BY_ROWS | {"embedding_update": "dense"})
    trainer.strategy.unshard()  # type: ignore[attr-defined]
    bags: Any = model.ebc.embedding_bags
    kept = zip(bags.values(), model.kept["tables"], strict=True)
    return all(bag.weight is weight for bag, weight in kept)


def test_kept_weights_are_the_modules_again_after_unshard() -> None:
    assert run_on_warm_ranks(_keeps_after_unshard, 2) == [True, True]


def test_a_checkpoint_of_numbers_of_numpy_is_plain(tmp_path: Any) -> None:
    folder = {"default_root_dir": str(tmp_path)}
    outcome = run_case(replace(CASES["numbers of int64"], look=_save, trainer=folder))[0]
    saved = torch.load(tmp_path / "it.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(saved[name], value) for name, value in outcome.state.items())
    assert torch.equal(outcome.seen, saved["item_embedding.weight"][3:40])


def _save(trainer: Any) -> Tensor:
    trainer.save_checkpoint(f"{trainer.default_root_dir}/it.ckpt")
    return trainer.strategy.full_parameter("item_embedding", rows=(np.int64(3), np.int64(40)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embedding_update": "fused"}, "embedding_update='fused': a weight that is read has"),
        ({"sharding_types": ["data_parallel"]}, "data_parallel tables are not gathered"),
        ({"replicated": True}, "gathered_weight would change nothing"),
    ],
)
def test_options_that_a_gathered_weight_cannot_have_are_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        TableOptions(gathered_weight=True, **options)
