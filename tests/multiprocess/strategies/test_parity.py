"""Sharded training gives the numbers of one unsharded process: optimizers x cuts x pooling, on 2
and 3 ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.support.cases import Case, check, click_case
from tests.support.click_model import FEATURES, ClickModel, SequenceModel
from tests.support.parameters import slow_except
from tests.support.plain_loop import limit_of

CUTS = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "data_parallel",
)
POOLINGS = {
    "sum": (PoolingType.SUM, False),
    "mean": (PoolingType.MEAN, False),
    "weighted": (PoolingType.SUM, True),
}
OPTIMIZERS: dict[str, tuple[type, dict[str, Any], str]] = {
    "SGD": (torch.optim.SGD, {"lr": 1.0}, "fused"),
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "dense"),
    "SGD weight_decay": (torch.optim.SGD, {"lr": 0.5, "weight_decay": 0.05}, "dense"),
    # Its first steps are of size lr whatever the gradient: rounding of gradients that cancel shows
    # at lr's scale.
    "Adagrad eps": (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-3}, "fused"),
    "Adagrad initial": (
        torch.optim.Adagrad,
        {"lr": 0.1, "initial_accumulator_value": 0.1},
        "fused",
    ),
    "Adagrad weight_decay": (torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.05}, "dense"),
    "Adagrad lr_decay": (torch.optim.Adagrad, {"lr": 0.02, "lr_decay": 0.1}, "dense"),
    "RowWiseAdagrad": (RowWiseAdagrad, {"lr": 0.1}, "fused"),
    "Adam amsgrad": (
        torch.optim.Adam,
        {"lr": 0.003, "weight_decay": 0.1, "amsgrad": True},
        "dense",
    ),
    "AdamW": (torch.optim.AdamW, {"lr": 0.001, "weight_decay": 0.1}, "dense"),
    # Gradients that cancel to 1e-9 must not become steps of the full rate: that would compare
    # rounding, not sharding.
    "RMSprop": (
        torch.optim.RMSprop,
        {"lr": 0.003, "momentum": 0.5, "centered": True, "eps": 1e-5},
        "dense",
    ),
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}, "dense"),
}


def cuts_for(name: str) -> tuple[str, ...]:
    """Return the cuts that the optimizer has an exact form for."""
    return tuple(cut for cut in CUTS if not (name.startswith("RowWise") and "column" in cut))


class EveryCut(ClickModel):
    """One collection for each pooling, one table for each cut; the features are shared by all of
    them."""

    def __init__(self, optimizer: type, options: dict[str, Any], cuts: tuple[str, ...]) -> None:
        self.cuts = cuts
        super().__init__(optimizer, options)

    def _build(self) -> None:
        collections = nn.ModuleDict()
        width = 0
        for pooling, (kind, weighted) in POOLINGS.items():
            configs = [
                EmbeddingBagConfig(
                    name=f"{pooling}_{cut}",
                    embedding_dim=(8, 16)[i % 2],
                    num_embeddings=61 + i,
                    feature_names=[FEATURES[i % 4], FEATURES[(i + 1) % 4]],
                    pooling=kind,
                )
                for i, cut in enumerate(self.cuts)
            ]
            collections[pooling] = EmbeddingBagCollection(tables=configs, is_weighted=weighted)
            width += sum(2 * config.embedding_dim for config in configs)
        self.ebc = collections
        self.first = nn.Linear(width, 56, bias=False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        columns = []
        for name, collection in self.ebc.items():
            weights = batch["weights"] if POOLINGS[name][1] else None
            features = KeyedJaggedTensor(
                FEATURES, batch["ids"], weights=weights, lengths=batch["lengths"]
            )
            columns.append(collection(features).values())
        return self.mlp(self.first(torch.cat(columns, 1))).squeeze(-1)


def _options(cuts: tuple[str, ...]) -> dict[str, Any]:
    return {
        f"{pooling}_{cut}": {
            "sharding_types": [cut],
            **({"min_partition": 4} if "column" in cut else {}),
        }
        for pooling in POOLINGS
        for cut in cuts
    }


def every_cut(name: str, num_ranks: int = 2) -> Case:
    """Return a case of tables of each pooling and cut, with this optimizer."""
    optimizer, options, kind = OPTIMIZERS[name]
    cuts = cuts_for(name)
    tables = [(f"{pooling}_{cut}", cut) for pooling in POOLINGS for cut in cuts]
    return click_case(
        EveryCut,
        (optimizer, options),
        cuts=cuts,
        num_ranks=num_ranks,
        steps=8,
        strategy={"tables": _options(cuts)},
        updates={table: "dense" if cut == "data_parallel" else kind for table, cut in tables},
        limit=limit_of(name),
    )


def sequences(name: str, cut: str, num_ranks: int = 2) -> Case:
    optimizer, options, _ = OPTIMIZERS[name]
    tables = {table: {"min_partition": 4} for table in ("wide", "narrow")}
    strategy = {"sharding_types": [cut], "tables": tables}
    fields = {"strategy": strategy, "num_ranks": num_ranks, "steps": 8, "limit": limit_of(name)}
    return click_case(SequenceModel, (optimizer, options), **fields)


USUAL = {
    **{name: every_cut(name) for name in ("Adagrad eps", "RowWiseAdagrad", "Adam amsgrad")},
    "RMSprop, three ranks": every_cut("RMSprop", 3),
    "sequences, SGD, columns": sequences("SGD", "column_wise"),
    "sequences, Adagrad initial": sequences("Adagrad initial", "row_wise", 3),
}
CASES = {name: every_cut(name) for name in OPTIMIZERS} | USUAL


@pytest.mark.parametrize("name", slow_except(list(USUAL), CASES))
def test_sharded_weights_equal_those_of_one_unsharded_process(name: str) -> None:
    check(CASES[name])
