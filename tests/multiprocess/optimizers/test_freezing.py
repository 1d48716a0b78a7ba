"""Tables and layers rest while they are frozen or another optimizer is toggled, and learn on
afterwards."""

from typing import Any

import pytest
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, KeyedJaggedTensor

from lightning_distrec import TorchRecShardedStrategy, TunedFSDPStrategy
from tests.support.cases import (
    Case,
    case_of,
    check,
    click_case,
    concatenate,
)
from tests.support.click_model import FEATURES, ClickModel, bag_configs
from tests.support.dense_models import (
    Unfreezes,
    UnfreezesAlone,
    UnfreezesBesideATable,
    dense_batch,
)
from tests.support.parameters import slow_except
from tests.support.plain_loop import EVERY_CUT, Batch, loss_of


class Freezes(ClickModel):
    """Freezes its tables, or one, between two steps. first: whether they learn at first.

    place: the hook that freezes.
    """

    def __init__(
        self,
        *args: Any,
        first: bool = True,
        turns: tuple[int, ...] = (2, 4),
        part: str = "",
        place: str = "hook",
    ) -> None:
        self.place = place
        super().__init__(*args)
        self.turns, self.part, self.learns = turns, part, first
        self.set_learning(first)

    def set_learning(self, learns: bool) -> None:
        """Freeze or unfreeze."""
        for name, weight in self.ebc.named_parameters():
            if self.part in name:
                weight.requires_grad_(learns)

    def _reach(self, place: str, batch_idx: int) -> None:
        if batch_idx in self.turns and (self.place == "step") == (place == "step"):
            self.learns = not self.learns
            self.set_learning(self.learns)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._reach("hook", batch_idx)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self._reach("step", batch_idx)
        return super().training_step(batch, batch_idx)


class Toggles(ClickModel):
    """Two optimizers that take turns, as in Lightning's documentation of GANs. num_tables: one, so
    that a rank may have no row of any."""

    def __init__(self, *args: Any, num_tables: int) -> None:
        self.num_tables = num_tables
        super().__init__(*args)
        self.automatic_optimization = False

    def _build(self) -> None:
        self.ebc = EmbeddingBagCollection(tables=bag_configs()[: self.num_tables])
        if self.num_tables == 1:
            self.first = nn.Linear(32, 56, bias=False).requires_grad_(False)

    def forward(self, batch: Batch) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        looked_up = self.ebc(features).values()
        inputs = self.first(looked_up) if self.num_tables == 1 else looked_up
        return self.mlp(inputs).squeeze(-1)

    def configure_optimizers(self) -> Any:
        return [self.optimizer(part.parameters(), **self.options) for part in (self.ebc, self.mlp)]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        for scale, optimizer in zip((1.0, 3.0), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            self.manual_backward(scale * loss_of(self, batch))
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)


class AtHalfTheRate(BaseFinetuning):
    """Lets the tables learn from epoch 1 on, at half the rate."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.ebc)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.ebc, optimizer, initial_denom_lr=2.0)


class LearnsInPart(ClickModel):
    """Gives its optimizer what learns at the start."""

    def configure_optimizers(self) -> Any:
        return self.optimizer([p for p in self.parameters() if p.requires_grad], **self.options)


def let_tables_learn(model: Any) -> None:
    model.set_learning(True)


def dense(kind: type, strategy: Any, **values: Any) -> Case:
    return case_of(
        kind,
        strategy=strategy,
        batch=dense_batch,
        join=concatenate,
        trainer={"max_epochs": 2},
        limit=1e-5,
        **values,
    )


BY = {cut: {"sharding_types": [cut]} for cut in ("row_wise", "table_wise", "column_wise")}
DENSE = {"embedding_update": "dense"}
HALF = {"max_epochs": 3, "callbacks": [AtHalfTheRate()]}
UNUSED = {"find_unused_parameters": True}
"""What DDP needs for dense layers that get no gradient."""
FEW = TorchRecShardedStrategy(min_rows=1)
CASES = {
    "all, columns": click_case(Freezes, strategy=BY["column_wise"]),
    "all, dense": click_case(Freezes, strategy=DENSE),
    "all, Adam": click_case(Freezes, "Adam"),
    "all, every cut": click_case(Freezes, "Adagrad", strategy=EVERY_CUT),
    "one, whole, dense": click_case(Freezes, strategy=DENSE | BY["table_wise"], part="wide"),
    "one, Adagrad": click_case(Freezes, "Adagrad", part="wide"),
    "late": click_case(Freezes, first=False, turns=(3,)),
    "late in a step, Adagrad": click_case(
        Freezes, "Adagrad", first=False, turns=(2,), place="step"
    ),
    "late in a step, Adam": click_case(Freezes, "Adam", first=False, turns=(2,), place="step"),
    "between two fits": click_case(
        Freezes, first=False, turns=(), fits=2, between=let_tables_learn
    ),
    "toggled, table-wise": click_case(
        Toggles, "Adam", num_tables=3, strategy=UNUSED | BY["table_wise"]
    ),
    "toggled, one table, SGD": click_case(
        Toggles, num_tables=1, strategy=UNUSED | BY["row_wise"], rests=("first",)
    ),
    "toggled, fused": click_case(
        Toggles, num_tables=3, strategy=UNUSED | {"embedding_update": "fused"}
    ),
    "finetuned": click_case(LearnsInPart, "Adam", strategy=BY["table_wise"], steps=4, trainer=HALF),
    "layers, fsdp_tuned": dense(Unfreezes, TunedFSDPStrategy(min_num_parameters=8)),
    "layers without tables": dense(Unfreezes, TorchRecShardedStrategy()),
    "layers beside a table": dense(UnfreezesBesideATable, FEW),
    "nothing dense at first": dense(UnfreezesAlone, FEW, rests=("high",)),
}


SLOW = (
    "all, columns",
    "all, dense",
    "one, whole, dense",
    "late in a step, Adam",
    "toggled, table-wise",
    "layers, fsdp_tuned",
    "layers without tables",
    "nothing dense at first",
)
"""Rows whose parts others have."""


@pytest.mark.parametrize("name", slow_except(set(CASES) - {*SLOW}, CASES))
def test_what_is_frozen_rests_and_learns_on_as_in_one_process(name: str) -> None:
    check(CASES[name])
