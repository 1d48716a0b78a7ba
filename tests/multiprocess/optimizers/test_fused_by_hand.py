"""Updates inside of backward under manual optimization, on request: exact, or an error on every
rank."""

import re
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR
from torchrec import KeyedJaggedTensor

from tests.support.click_model import (
    FEATURES,
    ClickModel,
    join_batches,
    largest_difference,
    make_batch,
    rank_loader,
    seeded,
)
from tests.support.plain_loop import Batch, State, loss_of
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.resuming import Life, Run, TwoOptimizers, live, problems_of
from tests.support.trainers import make_trainer

STEPS = 8
FUSED = {"embedding_update": "fused", "tables": {"wide": {"sharding_types": ["row_wise"]}}}
OWN = FUSED | {"table_optimizer": {"class_path": "Adagrad", "lr": 0.02}}


class Two(ClickModel):
    """Has one optimizer for its tables and one for its dense layers, and one backward for both."""

    def __init__(self) -> None:
        super().__init__(torch.optim.Adagrad, {"lr": 0.02})
        self.automatic_optimization = False
        self.kinds: set[str] = set()

    def configure_optimizers(self) -> Any:
        tables = self.optimizer(self.ebc.parameters(), **self.options)
        falling = ExponentialLR(tables, 0.9)
        return [tables, torch.optim.Adam(self.mlp.parameters(), lr=0.01)], [falling]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.by_hand(list(self.optimizers()), self.manual_backward, batch, batch_idx)

    def by_hand(self, optimizers: list[Any], backward: Any, batch: Batch, index: int) -> None:
        """Zero, backward, clip the dense layers, step, and let the rate of tables fall."""
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(loss_of(self, batch))
        if self._trainer is not None:
            self.clip_gradients(optimizers[1], 0.1, "value")
        else:
            torch.nn.utils.clip_grad_value_(self.mlp.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
        for group in optimizers[0].param_groups:
            group["lr"] *= 0.9

    def on_train_start(self) -> None:
        self.kinds = {update.kind for update in self.trainer.strategy.run_tables.updates.values()}


class InTurns(Two):
    """Updates tables and dense layers in turns, each by a backward of its own."""

    def by_hand(self, optimizers: list[Any], backward: Any, batch: Batch, index: int) -> None:
        for stepping, other in ((self.ebc, self.mlp), (self.mlp, self.ebc)):
            other.requires_grad_(False)
            optimizer = optimizers[0 if stepping is self.ebc else 1]
            backward(loss_of(self, batch))
            optimizer.step()
            optimizer.zero_grad()
            other.requires_grad_(True)


class InClosures(Two):
    """Lets a step compute its loss."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad(self.parameters(), lr=0.02)

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.by_hand([self.optimizers()], self.manual_backward, batch, batch_idx)

    def by_hand(self, optimizers: list[Any], backward: Any, batch: Batch, index: int) -> None:
        def closure() -> Tensor:
            optimizers[0].zero_grad()
            loss = loss_of(self, batch)
            backward(loss)
            return loss

        optimizers[0].step(closure)


class WithOwn(InClosures):
    """Has one optimizer, and tables have their own."""

    def configure_optimizers(self) -> Any:
        if self._trainer is not None:
            return torch.optim.Adam(self.parameters(), lr=0.01)
        return Both(self)


class Both:
    """Two optimizers as one, for the plain loop."""

    def __init__(self, model: Any) -> None:
        self.tables = torch.optim.Adagrad(model.ebc.parameters(), lr=0.02)
        self.dense = torch.optim.Adam(model.mlp.parameters(), lr=0.01)

    def zero_grad(self) -> None:
        self.tables.zero_grad()
        self.dense.zero_grad()

    def step(self, closure: Any) -> None:
        self.dense.step(closure)
        self.tables.step()


def _fit(kind: type, strategy: dict[str, Any], steps: int = STEPS) -> tuple[State, set[str]]:
    model = seeded(kind)
    make_trainer(strategy).fit(model, rank_loader(steps, rank_and_num_ranks()[0]))
    return model.final_state, model.kinds


def _plain(kind: type) -> State:
    model = seeded(kind)
    made = model.configure_optimizers()
    optimizers = made[0] if isinstance(made, tuple) else [made]
    for index in range(STEPS):
        batch = join_batches([make_batch(1000 * index + rank) for rank in range(2)])
        model.by_hand(optimizers, Tensor.backward, batch, index)
    return model.state_dict()


RUNS: dict[str, tuple[type, dict[str, Any]]] = {
    "two": (Two, FUSED),
    "in turns": (InTurns, FUSED | {"find_unused_parameters": True}),
    "in closures": (InClosures, FUSED),
    "with an own one": (WithOwn, OWN),
}


def test_each_step_after_a_backward_of_its_own_is_exact() -> None:
    actual = run_each_on_ranks({name: (_fit, *run) for name, run in RUNS.items()}, 2)[0]
    for name, (kind, _) in RUNS.items():
        state, kinds = actual[name]
        assert kinds == {"fused"}
        differences = largest_difference(state, _plain(kind))
        assert max(differences.values()) <= 1e-5, f"{name}: {differences}"


class Faulty(Two):
    """Makes a mistake from its second batch on."""

    mistake: str

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        tables, dense = self.optimizers()
        mistake = self.mistake if batch_idx else ""
        if mistake != "no zero_grad":
            tables.zero_grad()
        dense.zero_grad()
        self.manual_backward(loss_of(self, batch))
        if mistake == "second backward":
            self.manual_backward(loss_of_rows(self.looked_up))
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
        if not self.automatic_optimization and self.mistake == "second backward":
            self.looked_up = self.ebc(features).values()
        return self.mlp(self.ebc(features).values()).squeeze(-1)


def loss_of_rows(rows: Tensor) -> Tensor:
    """Return a loss of rows that were looked up before."""
    return rows.square().mean()


def _faults(mistakes: list[str]) -> dict[str, str]:
    message = {}
    for mistake in mistakes:
        for steps in (1, 2, 3):
            Faulty.mistake = mistake
            try:
                _fit(Faulty, FUSED | {"find_unused_parameters": True}, steps)
            except Exception as error:
                message[mistake] = f"{steps} {type(error).__name__}: {error}"
                break
    return message


SAID = {
    "second backward": "2 OptimizerError: table 'ebc.wide' is updated.*a second backward reaches "
    "it before the step",
    "looks again": "2 OptimizerError: .*it is looked up after a backward and before the step of "
    "Adagrad",
    "drops": "2 OptimizerError: .*Adagrad.zero_grad\\(\\) drops its gradient before the step",
    "rate": "2 OptimizerError: .*its learning rate was changed before the step of Adagrad",
    "clips": "2 UnsupportedError: gradient_clip_val=0.1: table 'ebc.wide' is updated inside of "
    "backward",
    "no step": "2 OptimizerError: .*training_step was left without the step of "
    "Adagrad.*embedding_update='auto'",
    "steps twice": "2 OptimizerError: .*Adagrad steps again with the same gradients",
    "no zero_grad": "2 OptimizerError: .*zero_grad\\(\\) was not called between its last step and "
    "this backward",
}


def test_every_other_order_is_refused_on_every_rank() -> None:
    for message in run_on_warm_ranks(_faults, 2, list(SAID)):
        assert message.keys() == SAID.keys()
        for mistake, pattern in SAID.items():
            assert re.match(pattern, message[mistake]), message[mistake]


def test_without_a_request_manual_optimization_waits_for_the_step() -> None:
    state, kinds = run_on_warm_ranks(_fit, 2, Two, {})[0]
    assert kinds == {"sparse"}
    assert max(largest_difference(state, _plain(Two)).values()) <= 1e-5


def test_a_run_by_hand_goes_on_from_a_checkpoint_fused_or_not() -> None:
    life = Life(
        Run(model=TwoOptimizers, strategy={"embedding_update": "fused"}),
        2,
        ((2, {}), (1, {"strategy": {}})),
    )
    assert problems_of(life, live({"life": life})["life"]) == []
