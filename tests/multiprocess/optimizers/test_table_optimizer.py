"""Tables with an optimizer of their own train as in one process that steps both optimizers at
once."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, LearningRateMonitor
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn, optim
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_distrec import ScaledLearningRate
from tests.support.cases import Case, Several, case_of, check, check_refused
from tests.support.click_model import ClickModel, StepsEverySecondTime
from tests.support.parameters import slow_except
from tests.support.plain_loop import Batch
from tests.support.ranks import rank_and_num_ranks
from tests.support.resuming import Clicks, Life, Run, live, problems_of

STEPS = 8
ADAGRAD = {"class_path": "torch.optim.Adagrad", "init_args": {"lr": 0.02}}
COARSE = {"class_path": "Adagrad", "init_args": {"lr": 0.02, "eps": 0.01}}
SGD = {"class_path": "SGD", "init_args": {"lr": 0.5}}
ROW_WISE = {"class_path": "RowWiseAdagrad", "lr": 0.02}
ADAM = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.003}}
SHARDINGS = {
    "wide": {"sharding_types": ["row_wise"]},
    "narrow": {"sharding_types": ["column_wise"], "min_partition": 4},
    "shared": {"sharding_types": ["data_parallel"]},
}
LINEAR = {
    "class_path": "torch.optim.lr_scheduler.LinearLR",
    "init_args": {"start_factor": 0.1, "total_iters": 5},
    "interval": "step",
}
AS_FUSED = {"wide": "fused", "narrow": "fused", "shared": "dense"}
AS_SPARSE = AS_FUSED | {"wide": "sparse", "narrow": "sparse"}


def linear(step: int) -> float:
    return 0.1 + 0.9 * min(step, 5) / 5


def falling(step: int) -> float:
    return 0.8**step


def of_tables(kind: type, **options: Any) -> Callable[[Any], list[Any]]:
    return partial(_of_tables, kind, options)


def _of_tables(kind: type, options: dict[str, Any], model: Any) -> list[Any]:
    return [kind(model.ebc.parameters(), **options)]


def sgd_and_row_wise(model: Any) -> list[Any]:
    bags = model.ebc.embedding_bags
    others = [*bags["narrow"].parameters(), *bags["shared"].parameters()]
    return [optim.SGD(bags["wide"].parameters(), lr=0.5), RowWiseAdagrad(others, lr=0.02)]


class OwnModel(ClickModel):
    """Gives parameters to Adam: all of them, its dense layers only, all in groups, or none.

    tables: in one process, makes the optimizers that the strategy's option makes on ranks.
    """

    def __init__(
        self,
        given: str = "all",
        tables: Callable[[Any], list[Any]] | None = None,
        rate: float = 0.01,
        eps: float = 1e-8,
    ) -> None:
        super().__init__(optim.Adam, {"lr": rate, "eps": eps})
        self.given, self.tables = given, tables

    def configure_optimizers(self) -> Any:
        if self.tables is not None:
            if self.given == "none":
                return Several(*self.tables(self))
            others = [p for name, p in self.named_parameters() if not name.startswith("ebc")]
            both = Several(*self.tables(self), optim.Adam(others, **self.options))
            return _scheduled(both, [linear, falling]) if self.given == "groups" else both
        if self.given == "none":
            return None
        if self.given == "groups":
            parts = [list(part.named_parameters()) for part in (self.ebc, self.mlp)]
            adam = optim.Adam([{"params": part} for part in parts], **self.options)
            return _scheduled(adam, [partial(pow, 0), falling])
        given = self.mlp if self.given == "dense" else self
        return optim.Adam(given.parameters(), **self.options)


def _scheduled(optimizer: Any, factors: list[Any]) -> dict[str, Any]:
    by_step = optim.lr_scheduler.LambdaLR(optimizer, factors)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": by_step, "interval": "step"}}


class ByHand(OwnModel):
    """Steps at every second batch, and clips."""

    automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(super().training_step(batch, batch_idx))
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
            optimizer.zero_grad()


class Skips(StepsEverySecondTime, OwnModel):
    """Forgets the gradients of the other batches."""


class Overflows(OwnModel):
    """Meets a loss that is too large, on one rank; its eps keep rounding from becoming steps."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        here = self.tables is not None or rank_and_num_ranks()[0] == 1
        return loss * torch.inf if batch_idx == 4 and here else loss


class WithSmall(OwnModel):
    """Has an embedding that is too small to be sharded."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.small = nn.Embedding(5, 1)

    def forward(self, batch: Batch) -> Tensor:
        zeros = torch.zeros(len(batch["label"]), dtype=torch.long, device=batch["label"].device)
        return super().forward(batch) + self.small(zeros).squeeze(1)


class Unfreezes(OwnModel):
    """Its tables learn from the fourth batch on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.ebc.requires_grad_(batch_idx >= 3)


ONE_ADAGRAD = of_tables(optim.Adagrad, lr=0.02)


def seen(trainer: Any) -> dict[str, Any]:
    monitors = [c.lrs for c in trainer.callbacks if isinstance(c, LearningRateMonitor)]
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    return {"rates": monitors, "group_sizes": [len(group["params"]) for group in groups]}


def case(
    kind: type = OwnModel,
    optimizer: dict[str, Any] = ADAGRAD,
    in_one_process: Any = ONE_ADAGRAD,
    **values: Any,
) -> Case:
    """Return a case of tables with this optimizer."""
    strategy = {"table_optimizer": optimizer, "tables": SHARDINGS} | values.pop("strategy", {})
    plain = values.pop("plain", {})
    fields = {"strategy": strategy, "updates": AS_FUSED, "steps": STEPS, "limit": 1e-5} | values
    fields["look"] = seen
    options = {"given": fields.pop("given", "all"), "eps": fields.pop("eps", 1e-8)}
    whole = partial(kind, tables=in_one_process, **options | plain)
    return case_of(kind, plain=whole, **options, **fields)


SCALER = torch.amp.GradScaler("cpu", init_scale=1024.0)
SCALED = {"plugins": [MixedPrecision("16-mixed", "cpu", SCALER)], "gradient_clip_val": 0.05}
MONITORED = {"callbacks": [LearningRateMonitor("step")], "logger": True, "log_every_n_steps": 1}
BY_TABLE = {"table_optimizer": ROW_WISE, "tables": {"wide": {"optimizer": SGD}}}
PLAIN_SGD = of_tables(optim.SGD, lr=0.5)
CASES = {
    "all in one": case(told=("table_optimizer's Adagrad has the same numbers in FBGEMM",)),
    "schedules": case(
        optimizer=ADAGRAD | {"lr_scheduler": LINEAR}, given="groups", trainer=MONITORED
    ),
    "none": case(optimizer=SGD, in_one_process=PLAIN_SGD, given="none", rests=("mlp",)),
    "Adam": case(
        optimizer=ADAM,
        in_one_process=of_tables(optim.Adam, lr=0.003),
        updates="dense",
        told=("table_optimizer's Adam moves rows that no id touched",),
    ),
    "two of tables": case(in_one_process=sgd_and_row_wise, strategy=BY_TABLE, updates="fused"),
    "by hand": case(ByHand, updates=AS_SPARSE),
    "skips": case(Skips, updates=AS_SPARSE),
    "unfreezes": case(Unfreezes, strategy={"tables": {}}, updates="fused"),
    "clipped and accumulated": case(
        given="dense",
        trainer={"gradient_clip_val": 0.05, "accumulate_grad_batches": 2},
        updates=AS_SPARSE,
        told=("table_optimizer's Adagrad: ",),
    ),
    "scaled": case(
        Overflows,
        optimizer=COARSE,
        in_one_process=of_tables(optim.Adagrad, lr=0.02, eps=0.01),
        eps=1e-3,
        trainer=SCALED,
        updates=AS_SPARSE,
        limit=1e-4,
        loss_limit=None,
    ),
    "faster, fsdp": case(
        in_one_process=of_tables(optim.Adagrad, lr=0.04),
        plain={"rate": 0.02},
        trainer={"callbacks": [ScaledLearningRate(base_ranks=1)]},
        strategy={"dense": "fsdp", "fsdp": {"min_num_parameters": 1}},
    ),
    "a small table stays": case(
        WithSmall,
        num_ranks=1,
        told=("table_optimizer: 'small' is not sharded, and stays with the optimizer of",),
        updates="",
    ),
}


SLOW = (
    "none",
    "skips",
    "unfreezes",
)
"""Rows whose parts others have."""


@pytest.mark.parametrize("name", slow_except(set(CASES) - {*SLOW}, CASES))
def test_both_optimizers_give_the_numbers_of_one_process(name: str) -> None:
    outcome = check(CASES[name])[0]
    lines = [line for line in outcome.lines if "is not sharded" in line]
    assert name.startswith("a small") or not lines
    if name == "schedules":
        assert outcome.seen["group_sizes"] == [0, 2]
        (rates,), steps = outcome.seen["rates"], range(STEPS)
        assert rates["lr-table_optimizer"] == pytest.approx([0.02 * linear(step) for step in steps])
        assert rates["lr-Adam/pg2"] == pytest.approx([0.01 * falling(step) for step in steps])


class FallsByStep(Clicks):
    """Gives all of its parameters to Adam, whose rate falls by the step."""

    def configure_optimizers(self) -> Any:
        return _scheduled(optim.Adam(self.parameters(), lr=0.01), [falling])


OWN_PLAN = {
    "wide": {"sharding_types": ["row_wise"], "optimizer": ROW_WISE},
    "narrow": SHARDINGS["narrow"],
}
OWN = {"table_optimizer": ADAGRAD | {"lr_scheduler": LINEAR}, "tables": OWN_PLAN}
LIVES = {
    "one to three ranks": Life(
        Run(model=FallsByStep, strategy=OWN | {"checkpoint": {"distributed": True}}),
        2,
        (
            (1, {"strategy": OWN | {"embedding_update": "dense"}}),
            (3, {"strategy": OWN | {"tables": {"wide": {"optimizer": ROW_WISE}}}}),
        ),
    ),
    "one file, accumulated": Life(
        Run(model=FallsByStep, strategy=OWN, trainer={"accumulate_grad_batches": 2}), 2, ((1, {}),)
    ),
    "without": Life(Run(strategy={}), 2, ((1, {"strategy": OWN}),)),
    "with": Life(Run(strategy={"table_optimizer": ADAGRAD}), 2, ((1, {"strategy": {}}),)),
}


def test_a_run_goes_on_from_a_checkpoint_and_one_of_other_optimizers_is_refused() -> None:
    lived = live(LIVES)
    for name in ("one to three ranks", "one file, accumulated"):
        assert problems_of(LIVES[name], lived[name]) == [], name
    for name, words in (("without", "0 optimizers of tables"), ("with", "1 optimizers")):
        failed = lived[name].later[0][0].failed
        assert f"CheckpointError: the checkpoint has the state of {words}" in failed
        assert "checkpoint={'start_from': path}" in failed


class AddsTablesLater(BaseFinetuning):
    """Unfreezes the tables as fine-tuning callbacks do."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.ebc)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.ebc, optimizer)


def test_a_table_that_is_added_to_a_second_optimizer_is_refused_on_every_rank() -> None:
    later = case(trainer={"callbacks": [AddsTablesLater()], "max_epochs": 2})
    words = "was added to the optimizer of configure_optimizers, and has table_optimizer"
    check_refused(later, words)
