"""Updates inside of backward under manual optimization, on request: exact, or an error on every
rank."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR
from torchrec import KeyedJaggedTensor

from tests.support.cases import Several, case_of, check, check_refused
from tests.support.click_model import FEATURES, ClickModel
from tests.support.plain_loop import Batch, loss_of
from tests.support.resuming import Life, Run, TwoOptimizers, live, problems_of

FUSED = {"embedding_update": "fused", "tables": {"wide": {"sharding_types": ["row_wise"]}}}
OWN = FUSED | {"table_optimizer": {"class_path": "Adagrad", "lr": 0.02}}
UNUSED = {"find_unused_parameters": True}


class Two(ClickModel):
    """Has one optimizer for its tables and one for its dense layers, and one backward for both."""

    def __init__(self) -> None:
        super().__init__(torch.optim.Adagrad, {"lr": 0.02})
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        tables = self.optimizer(self.ebc.parameters(), **self.options)
        falling = ExponentialLR(tables, 0.9)
        return [tables, torch.optim.Adam(self.mlp.parameters(), lr=0.01)], [falling]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss_of(self, batch))
        self.clip_gradients(optimizers[1], 0.1, "value")
        for optimizer in optimizers:
            optimizer.step()
        for group in optimizers[0].param_groups:
            group["lr"] *= 0.9


class InTurns(Two):
    """Updates tables and dense layers in turns, each by a backward of its own."""

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        parts = (self.ebc, self.mlp)
        for place, optimizer in enumerate(self.optimizers()):
            parts[1 - place].requires_grad_(False)
            self.manual_backward(loss_of(self, batch))
            optimizer.step()
            optimizer.zero_grad()
            parts[1 - place].requires_grad_(True)


class InClosures(Two):
    """Lets a step compute its loss. by_table: in one process, the optimizer of tables."""

    def __init__(self, by_table: bool = False) -> None:
        super().__init__()
        self.by_table = by_table

    def configure_optimizers(self) -> Any:
        if not self.by_table:
            return torch.optim.Adam(self.parameters(), lr=0.01)
        tables = torch.optim.Adagrad(self.ebc.parameters(), lr=0.02)
        return Several(tables, torch.optim.Adam(self.mlp.parameters(), lr=0.01))

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(self, batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)


VALUES: dict[str, Any] = {"steps": 8, "limit": 1e-5}
CASES = {
    "two": case_of(Two, strategy=FUSED, updates="fused", **VALUES),
    "in turns": case_of(InTurns, strategy=FUSED | UNUSED, updates="fused", **VALUES),
    "in closures, with an own one": case_of(
        InClosures, plain=partial(InClosures, True), strategy=OWN, updates="fused", **VALUES
    ),
    "not requested": case_of(Two, updates="sparse", **VALUES),
}


@pytest.mark.parametrize("name", CASES)
def test_each_step_after_a_backward_of_its_own_is_exact(name: str) -> None:
    check(CASES[name])


class Faulty(Two):
    """Makes a mistake from its second batch on."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake = mistake

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        tables, dense = self.optimizers()
        mistake = self.mistake if batch_idx else ""
        if mistake != "no zero_grad":
            tables.zero_grad()
        dense.zero_grad()
        self.manual_backward(loss_of(self, batch))
        if mistake == "second backward":
            self.manual_backward(self.looked_up.square().mean())
        if mistake == "looks again":
            loss_of(self, batch)
        if mistake == "drops":
            tables.zero_grad()
        if mistake == "rate":
            tables.param_groups[0]["lr"] = 0.5
        if mistake == "clips":
            self.clip_gradients(tables, 0.1)
        if mistake != "no step":
            tables.step()
        if mistake == "steps twice":
            tables.step()
        dense.step()

    def forward(self, batch: Batch) -> Tensor:
        features = KeyedJaggedTensor(keys=FEATURES, values=batch["ids"], lengths=batch["lengths"])
        if self.mistake == "second backward":
            self.looked_up = self.ebc(features).values()
        return self.mlp(self.ebc(features).values()).squeeze(-1)


SAID = {
    "second backward": "a second backward reaches it before the step",
    "looks again": "it is looked up after a backward and before the step of Adagrad",
    "drops": "Adagrad.zero_grad() drops its gradient before the step",
    "rate": "its learning rate was changed before the step of Adagrad",
    "clips": "gradient_clip_val=0.1: table 'ebc.wide' is updated inside of backward",
    "no step": "training_step was left without the step of Adagrad",
    "steps twice": "Adagrad steps again with the same gradients",
    "no zero_grad": "zero_grad() was not called between its last step and this backward",
}


@pytest.mark.parametrize("mistake", SAID)
def test_every_other_order_is_refused_on_every_rank(mistake: str) -> None:
    case = case_of(Faulty, mistake, strategy=FUSED | UNUSED, steps=2)
    check_refused(case, SAID[mistake], started=2)


def test_a_run_by_hand_goes_on_from_a_checkpoint_fused_or_not() -> None:
    life = Life(
        Run(model=TwoOptimizers, strategy={"embedding_update": "fused"}),
        2,
        ((2, {}), (1, {"strategy": {}})),
    )
    assert problems_of(life, live({"life": life})["life"]) == []
