"""A lookup whose gradient would not reach its tables is an error before the first step, and not a
table that stays."""

from typing import Any

import pytest
from torch import Tensor

from tests.support.cases import check_refused, click_case
from tests.support.click_model import ClickModel


def _detached(module: Any, arguments: Any, output: Tensor) -> Tensor:
    return output.detach()


class Losing(ClickModel):
    """Loses the gradient between kernels and exchange, as an operation without a form for backward
    does: of all tables, or of the first ones."""

    def __init__(self, *args: Any, number: int | None) -> None:
        super().__init__(*args)
        self.number = number

    def on_train_start(self) -> None:
        (lookup,) = self.trainer.strategy.run_tables.lookups
        for part in lookup.setup.sharded._lookups[: self.number]:
            part.register_forward_hook(_detached)


@pytest.mark.parametrize("number", [None, 1])
def test_it_names_the_collection(number: int | None) -> None:
    tables = {name: {"sharding_types": ["row_wise"]} for name in ("wide", "narrow")}
    tables["shared"] = {"sharding_types": ["table_wise"]}
    case = click_case(Losing, number=number, strategy={"tables": tables}, steps=2)
    message = "ShardingError: 'ebc' was looked up for training, and no gradient of its rows reaches"
    for error in check_refused(case, message):
        # "some of its tables" on a rank that holds others too.
        if number is None:
            assert f"{message} its tables: they would stay as they are" in error
