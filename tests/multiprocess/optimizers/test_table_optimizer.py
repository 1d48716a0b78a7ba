"""Tables with an optimizer of their own train as in one process that steps both optimizers at
once."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, LearningRateMonitor
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from lightning_distrec import ScaledLearningRate
from tests.support.click_model import ClickModel, largest_difference, rank_loader, seeded
from tests.support.plain_loop import Batch, State, global_batches, loss_of
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.resuming import Clicks, Life, Run, live, problems_of
from tests.support.trainers import make_trainer

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


class AllInOne(ClickModel):
    """Gives all of its parameters to Adam, tables too."""

    def __init__(self) -> None:
        super().__init__(torch.optim.Adam, {"lr": 0.01})
        self.seen: dict[str, Any] = {}

    def on_train_start(self) -> None:
        tables = self.trainer.strategy.run_tables
        self.seen["kinds"] = {
            name.split(".")[-1]: update.kind for name, update in tables.updates.items()
        }
        self.seen["why"] = {update.reason for update in tables.updates.values()}
        self.seen["group_sizes"] = [
            len(group["params"]) for o in self.trainer.optimizers for group in o.param_groups
        ]


class DenseOnly(AllInOne):
    """Has an optimizer for its dense layers only."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.mlp.parameters(), lr=0.01)


class InGroups(AllInOne):
    """Has a group that is of tables alone, named parameters, and a scheduler with a function for
    each group."""

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": list(self.ebc.named_parameters())},
            {"params": list(self.mlp.named_parameters())},
        ]
        optimizer = torch.optim.Adam(groups, lr=0.01)
        falling = torch.optim.lr_scheduler.LambdaLR(
            optimizer, [lambda step: 0.0, lambda step: 0.8**step]
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falling, "interval": "step"}}


class NoOptimizer(AllInOne):
    """Has none for its dense layers."""

    def configure_optimizers(self) -> None:
        return None


class ByHand(AllInOne):
    """Steps at every second batch, and clips."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(loss_of(self, batch))
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.05, "norm")
            optimizer.step()
            optimizer.zero_grad()


class Skips(AllInOne):
    """Steps at every second batch, and forgets the gradients of the others."""

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any
    ) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class Overflows(AllInOne):
    """Meets a loss that is too large, on one rank; its eps keep rounding from becoming steps."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * torch.inf if batch_idx == 4 and rank_and_num_ranks()[0] == 1 else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01, eps=1e-3)


class WithSmall(AllInOne):
    """Has an embedding that is too small to be sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Embedding(5, 1)

    def forward(self, batch: Batch) -> Tensor:
        return super().forward(batch) + self.small(
            torch.zeros(len(batch["label"]), dtype=torch.long)
        ).squeeze(1)


class Unfreezes(AllInOne):
    """Its tables learn from the fourth batch on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.ebc.requires_grad_(batch_idx >= 3)


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _fit(
    kind: type, strategy: dict[str, Any], extra: Callable[[], dict[str, Any]] = dict
) -> tuple[State, Any]:
    model = seeded(kind)
    lines = Lines()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(lines)
    trainer = make_trainer(strategy, **extra())
    trainer.fit(model, rank_loader(STEPS, rank_and_num_ranks()[0]))
    monitors = [c for c in trainer.callbacks if isinstance(c, LearningRateMonitor)]
    model.seen["output"] = lines.lines
    model.seen["rates"] = [monitor.lrs for monitor in monitors]
    return model.final_state, model.seen


def _plain(
    kind: type,
    tables: Callable[[Any], torch.optim.Optimizer],
    every: int = 1,
    norm: float | None = None,
    prepare: Callable[[Any, int], Any] = lambda *_: None,
    forgets: bool = False,
    dense: bool = True,
) -> State:
    """Train in this process. every: batches of a step. norm: the gradients' largest."""
    model = seeded(kind)
    optimizers: list[Any] = [tables(model.ebc.parameters())]
    optimizers += [torch.optim.Adam(model.mlp.parameters(), lr=0.01)] if dense else []
    for index, batch in enumerate(global_batches(STEPS)):
        prepare(model, index)
        (loss_of(model, batch) / (1 if forgets or kind is ByHand else every)).backward()
        if (index + 1) % every == 0:
            if norm is not None:
                clip_grad_norm_(model.parameters(), norm)
            for optimizer in optimizers:
                optimizer.step()
        if forgets or (index + 1) % every == 0:
            model.zero_grad()
    return model.state_dict()


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=0.02)


def _with_rates(*factors: Callable[[int], float]) -> State:
    """Train with factors of both rates, by the step."""
    model = seeded(AllInOne)
    optimizers: list[Any] = [
        adagrad(model.ebc.parameters()),
        torch.optim.Adam(model.mlp.parameters(), lr=0.01),
    ]
    for step, batch in enumerate(global_batches(STEPS)):
        for optimizer, factor, rate in zip(optimizers, factors, (0.02, 0.01), strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor(step)
        model.zero_grad()
        loss_of(model, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    return model.state_dict()


def _two_of_tables() -> State:
    model = seeded(AllInOne)
    bags = model.ebc.embedding_bags
    optimizers = [
        torch.optim.SGD(bags["wide"].parameters(), lr=0.5),
        RowWiseAdagrad([*bags["narrow"].parameters(), *bags["shared"].parameters()], lr=0.02),
        torch.optim.Adam(model.mlp.parameters(), lr=0.01),
    ]
    for batch in global_batches(STEPS):
        model.zero_grad()
        loss_of(model, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    return model.state_dict()


def _own(optimizer: Any, **extra: Any) -> dict[str, Any]:
    return {"table_optimizer": optimizer, "tables": SHARDINGS, **extra}


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


def accumulated() -> dict[str, Any]:
    return {"accumulate_grad_batches": 2}


def clipped() -> dict[str, Any]:
    return {"gradient_clip_val": 0.05}


def scaled() -> dict[str, Any]:
    return {"plugins": [MixedPrecision("16-mixed", "cpu", _scaler())], **clipped()}


def monitored() -> dict[str, Any]:
    return {"callbacks": [LearningRateMonitor("step")], "logger": True, "log_every_n_steps": 1}


def faster() -> dict[str, Any]:
    return {"callbacks": [ScaledLearningRate(base_ranks=1)]}


RUNS: dict[str, tuple[Any, ...]] = {
    "all in one": (_fit, AllInOne, _own(ADAGRAD)),
    "dense only": (_fit, DenseOnly, _own(ADAGRAD)),
    "schedules": (_fit, InGroups, _own(ADAGRAD | {"lr_scheduler": LINEAR}), monitored),
    "none": (_fit, NoOptimizer, _own(SGD)),
    "Adam": (_fit, AllInOne, _own(ADAM)),
    "two of tables": (
        _fit,
        AllInOne,
        {"table_optimizer": ROW_WISE, "tables": {"wide": {"optimizer": SGD}}},
    ),
    "by hand": (_fit, ByHand, _own(ADAGRAD)),
    "skips": (_fit, Skips, _own(ADAGRAD)),
    "unfreezes": (_fit, Unfreezes, {"table_optimizer": ADAGRAD}),
    "accumulated": (_fit, AllInOne, _own(ADAGRAD), accumulated),
    "clipped": (_fit, AllInOne, _own(ADAGRAD), clipped),
    "scaled": (_fit, Overflows, _own(COARSE), scaled),
    "faster": (_fit, AllInOne, _own(ADAGRAD), faster),
    "fsdp": (_fit, AllInOne, _own(ADAGRAD, dense="fsdp", fsdp={"min_num_parameters": 1})),
}


def _linear(step: int) -> float:
    return 0.1 + 0.9 * min(step, 5) / 5


def _by_schedules() -> State:
    return _with_rates(_linear, lambda step: 0.8**step)


def _unfrozen() -> State:
    return _plain(
        Unfreezes, adagrad, prepare=lambda model, index: model.ebc.requires_grad_(index >= 3)
    )


def _scaled() -> State:
    model, scaler = seeded(Overflows), _scaler()
    optimizers = [torch.optim.Adagrad(model.ebc.parameters(), lr=0.02, eps=0.01)]
    optimizers.append(torch.optim.Adam(model.mlp.parameters(), lr=0.01, eps=1e-3))
    for index, batch in enumerate(global_batches(STEPS)):
        model.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, batch) * (torch.inf if index == 4 else 1.0)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.05)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    return model.state_dict()


WANTED: dict[str, Callable[[], State]] = {
    "all in one": lambda: _plain(AllInOne, adagrad),
    "dense only": lambda: _plain(AllInOne, adagrad),
    "schedules": _by_schedules,
    "none": lambda: _plain(AllInOne, lambda p: torch.optim.SGD(p, lr=0.5), dense=False),
    "Adam": lambda: _plain(AllInOne, lambda p: torch.optim.Adam(p, lr=0.003)),
    "two of tables": _two_of_tables,
    "by hand": lambda: _plain(ByHand, adagrad, 2, 0.05),
    "skips": lambda: _plain(AllInOne, adagrad, 2, forgets=True),
    "unfreezes": _unfrozen,
    "accumulated": lambda: _plain(AllInOne, adagrad, 2),
    "clipped": lambda: _plain(AllInOne, adagrad, norm=0.05),
    "scaled": _scaled,
    "faster": lambda: _with_rates(lambda _: 2.0, lambda _: 2.0),
    "fsdp": lambda: _plain(AllInOne, adagrad),
}
FUSED = (
    "all in one",
    "dense only",
    "schedules",
    "none",
    "two of tables",
    "unfreezes",
    "faster",
    "fsdp",
)


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """What rank 0 trained and saw in each run."""
    return run_each_on_ranks(RUNS, 2)[0]


@pytest.mark.parametrize("run", RUNS)
def test_both_optimizers_give_the_numbers_of_one_process(results: dict[str, Any], run: str) -> None:
    state, seen = results[run]
    differences = largest_difference(state, WANTED[run]())
    assert max(differences.values()) <= (1e-4 if run == "scaled" else 1e-5), differences
    kinds = {"wide": "fused", "narrow": "fused", "shared": "dense"}
    if run == "two of tables" or run == "unfreezes":
        kinds["shared"] = "fused"
    elif run == "Adam":
        kinds = dict.fromkeys(kinds, "dense")
    elif run not in FUSED:
        kinds |= {"wide": "sparse", "narrow": "sparse"}
    assert seen["kinds"] == kinds


def test_tables_leave_the_optimizer_of_the_module_which_keeps_its_groups(
    results: dict[str, Any],
) -> None:
    group_sizes = {run: seen["group_sizes"] for run, (_, seen) in results.items()}
    assert group_sizes["all in one"] == group_sizes["dense only"] == [2]
    assert group_sizes["schedules"] == [0, 2]


def test_the_start_table_says_which_optimizer_updates_a_table_and_why(
    results: dict[str, Any],
) -> None:
    assert (
        "table_optimizer's Adagrad has the same numbers in FBGEMM"
        in results["all in one"][1]["why"]
    )
    assert "table_optimizer's Adam moves rows that no id touched" in results["Adam"][1]["why"]
    assert "table_optimizer's Adagrad: gradient_clip_val=0.05" in results["clipped"][1]["why"]


def test_embeddings_that_are_not_sharded_are_named(results: dict[str, Any]) -> None:
    output = run_on_warm_ranks(_fit, 1, WithSmall, {"table_optimizer": ADAGRAD})[0][1]["output"]
    assert [
        line
        for line in output
        if "table_optimizer: 'small' is not sharded, and stays with the optimizer of" in line
    ]
    assert not [line for line in results["all in one"][1]["output"] if "is not sharded" in line]


def test_the_monitor_of_learning_rates_shows_the_rate_of_tables(results: dict[str, Any]) -> None:
    (rates,) = results["schedules"][1]["rates"]
    assert rates["lr-table_optimizer"] == pytest.approx([
        0.02 * _linear(step) for step in range(STEPS)
    ])
    assert rates["lr-Adam/pg2"] == pytest.approx([0.01 * 0.8**step for step in range(STEPS)])


class FallsByStep(Clicks):
    """Gives all of its parameters to Adam, whose rate falls by the step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        falling = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": falling, "interval": "step"}}


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
            (2, {}),
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


@pytest.fixture(scope="module")
def lived() -> dict[str, Any]:
    """What became of runs that are saved, and go on elsewhere."""
    return live(LIVES)


@pytest.mark.parametrize("life", ["one to three ranks", "one file, accumulated"])
def test_a_run_that_goes_on_from_a_checkpoint_is_the_one_that_never_stopped(
    lived: dict[str, Any], life: str
) -> None:
    assert problems_of(LIVES[life], lived[life]) == []


@pytest.mark.parametrize(
    ("life", "message"), [("without", "0 optimizers of tables"), ("with", "1 optimizers")]
)
def test_a_checkpoint_of_other_optimizers_is_refused_with_a_way_out(
    lived: dict[str, Any], life: str, message: str
) -> None:
    failed = lived[life].later[0][0].failed
    assert f"CheckpointError: the checkpoint has the state of {message}" in failed
    assert "checkpoint={'start_from': path}" in failed


class AddsTablesLater(BaseFinetuning):
    """Unfreezes the tables as fine-tuning callbacks do."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.ebc)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.ebc, optimizer)


def added_later() -> dict[str, Any]:
    return {"callbacks": [AddsTablesLater()], "max_epochs": 2}


def test_a_table_that_is_added_to_a_second_optimizer_is_refused_on_every_rank() -> None:
    with pytest.raises(RankFailed) as failed:
        run_on_warm_ranks(_fit, 2, AllInOne, {"table_optimizer": ADAGRAD}, added_later)
    assert (
        str(failed.value).count(
            "was added to the optimizer of configure_optimizers, and has table_optimizer"
        )
        == 2
    )
