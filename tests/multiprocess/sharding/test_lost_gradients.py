"""A lookup whose gradient would not reach its tables is an error before the first step, and not a
table that stays."""

from typing import Any

from torch import Tensor, optim

from tests.support.click_model import ClickModel, rank_loader, seeded
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import make_trainer


def _detached(module: Any, arguments: Any, output: Tensor) -> Tensor:
    return output.detach()


class Losing(ClickModel):
    """Loses the gradient between kernels and exchange, as an operation without a form for backward
    does."""

    lose = ""

    def on_train_start(self) -> None:
        (lookup,) = self.trainer.strategy.run_tables.lookups
        parts = {
            "": [],
            "some": lookup.setup.sharded._lookups[:1],
            "all": lookup.setup.sharded._lookups,
        }[self.lose]
        for part in parts:
            part.register_forward_hook(_detached)


def _fit(lose: str) -> str:
    model = seeded(Losing, optim.SGD, {"lr": 0.1})
    model.lose = lose
    tables = {name: {"sharding_types": ["row_wise"]} for name in ("wide", "narrow")}
    try:
        trainer = make_trainer({"tables": tables | {"shared": {"sharding_types": ["table_wise"]}}})
        trainer.fit(model, rank_loader(2, rank_and_num_ranks()[0]))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_it_names_the_collection() -> None:
    per_rank = run_each_on_ranks({lose: (_fit, lose) for lose in ("", "all", "some")}, 2)
    for messages in per_rank:
        assert messages[""] == ""
        message = (
            "ShardingError: 'ebc' was looked up for training, and no gradient of its rows reaches"
        )
        assert f"{message} its tables: they would stay as they are" in messages["all"]
        # "some of its tables" on a rank that holds others too.
        assert message in messages["some"]
