"""What an update would silently not follow is told on every rank, before a number is wrong."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_distrec.errors import OptimizerError
from tests.support.cases import Case, check_refused, click_case
from tests.support.click_model import ClickModel, LooksUpTwice, rank_loader, seeded
from tests.support.plain_loop import OPTIMIZERS, Batch
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import make_trainer

FUSED = {"embedding_update": "fused"}


class WithL2(ClickModel):
    """Has the tables' own weights in its loss."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        squares = [weight.pow(2).sum() for weight in self.ebc.parameters()]
        return super().training_step(batch, batch_idx) + 0.05 * torch.stack(squares).sum()


class ReadsWeight(ClickModel):
    """Scores against a whole table."""

    def forward(self, batch: Batch) -> Tensor:
        return super().forward(batch) + self.ebc.embedding_bags["wide"].weight[:5].sum()


class NotWeighted(ClickModel):
    """Forgets the weights of a weighted collection."""

    def forward(self, batch: Batch) -> Tensor:
        self.weighted = False
        return super().forward(batch)


class KeepsItsOptimizer(ClickModel):
    """Makes its optimizer once."""

    kept_optimizer: Any = None

    def configure_optimizers(self) -> Any:
        if self.kept_optimizer is None:
            self.kept_optimizer = super().configure_optimizers()
        return self.kept_optimizer


class LoadsState(ClickModel):
    """Restores an optimizer state of its own."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
        return optimizer


class Changes(ClickModel):
    """Changes what a fused update does not follow, behind the Trainer's back."""

    def __init__(self, *args: Any, what: str) -> None:
        super().__init__(*args)
        self.what = what

    def on_train_start(self) -> None:
        if self.what == "accumulation":
            self.trainer.accumulate_grad_batches = 2
        if self.what == "hooks":
            for parameter in self.parameters():
                parameter.register_hook(lambda gradient: gradient * 0.5)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.what == "decay" and batch_idx == 2:
            self.trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.1


class ClipsTables(ClickModel):
    """Clips the tables' gradients by itself."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.ebc.parameters(), 0.01)


def without_tables_on_rank_1() -> ClickModel:
    model = ClickModel(*OPTIMIZERS["SGD"])
    if rank_and_num_ranks()[0] == 1:
        model.ebc = nn.Identity()
    return model


CLIPPED = "UnsupportedError: torch.nn.utils.clip_grad_norm_ was called with gradients of"
READ = "ShardedWeightError: the weight of the sharded table 'ebc.wide' was read"
REFUSED: dict[str, tuple[Case, str]] = {
    "two lookups": (
        click_case(LooksUpTwice, "Adagrad", strategy=FUSED),
        "OptimizerError: gradients came to more than one lookup of 'ebc' in a step",
    ),
    "L2": (click_case(WithL2), "OptimizerError: the loss uses the weight of 'ebc."),
    "a weight is read": (click_case(ReadsWeight), READ),
    "weights are forgotten": (
        click_case(NotWeighted, weighted=True),
        "'ebc' is weighted, and was called with ids that have",
    ),
    "accumulation": (
        click_case(Changes, what="accumulation"),
        "OptimizerError: a second backward before optimizer.step",
    ),
    "a hook": (
        click_case(Changes, what="hooks"),
        "OptimizerError: a gradient hook was registered on the weight of 'ebc.wide'",
    ),
    "a decay": (click_case(Changes, what="decay"), "weight_decay=0.1"),
    "clipped gradients, Adam": (click_case(ClipsTables, "Adam"), CLIPPED),
    "a second fit, Adam": (
        click_case(KeepsItsOptimizer, "Adam", fits=2),
        "its Adam has stepped before",
    ),
    "a state": (click_case(LoadsState, "Adam"), "its Adam has stepped before"),
    "on meta": (
        click_case(ClickModel, meta=True, strategy=FUSED, trainer={"gradient_clip_val": 1.0}),
        "UnsupportedError: gradient_clip_val=1.0",
    ),
    "a rank without tables": (
        Case(module=without_tables_on_rank_1),
        "ShardingError: the ranks have different tables",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_reported_on_every_rank(name: str) -> None:
    check_refused(*REFUSED[name])


class BackwardByHand(ClickModel):
    """Calls backward by itself: in training_step, in a step of evaluation, or after an optimizer's
    step."""

    def __init__(self, *args: Any, place: str) -> None:
        super().__init__(*args)
        self.place = place

    def backward_at(self, place: str, batch: Batch) -> None:
        """Call backward, and forget its gradients, where this is the place."""
        if place == self.place:
            with torch.enable_grad():
                self(batch).square().mean().backward()
            self.zero_grad()

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.backward_at("training", batch)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.backward_at("validation", batch)

    def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
        self.backward_at("batch end", batch)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.backward_at("predict", batch)
        return self(batch)


def _by_hand(place: str, update: str) -> tuple[str, dict[str, Tensor]]:
    model = seeded(BackwardByHand, *OPTIMIZERS["SGD"], place=place)
    trainer = make_trainer({"embedding_update": update}, inference_mode=False)
    data = rank_loader(4, rank_and_num_ranks()[0])
    try:
        trainer.fit(model, data, rank_loader(2, 0))
        trainer.predict(model, data)
        if place == "script":
            model.backward_at(place, next(iter(data)))
    except OptimizerError as error:
        return str(error), {}
    return "", model.final_state


def test_a_backward_by_hand_moves_no_table() -> None:
    places = ["training", "validation", "batch end", "predict", "script"]
    calls: dict[str, tuple[Any, ...]] = {place: (_by_hand, place, "fused") for place in places}
    calls |= {f"{place} sparse": (_by_hand, place, "sparse") for place in ("none", "validation")}
    for results in run_each_on_ranks(calls, 2):
        for place in places:
            assert "user code has called reaches table 'ebc.wide'" in results[place][0], place
        # Gradients that zero_grad drops change nothing.
        message, state = results["validation sparse"]
        assert message == ""
        assert all(torch.equal(state[key], results["none sparse"][1][key]) for key in state)
