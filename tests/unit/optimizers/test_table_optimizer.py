"""What describes an optimizer of tables, what it cannot be, and how tables leave the module's
optimizer."""

import re
from typing import Any

import pytest
import torch
from jsonargparse import Namespace
from torch import nn

from lightning_distrec import TableOptions, TorchRecShardedStrategy
from lightning_distrec.errors import ConfigError, OptimizerError
from lightning_distrec.optimizers.table_optimizer import (
    build_table_optimizers,
    parse_table_optimizer,
)

PLATEAU = {"class_path": "torch.optim.lr_scheduler.ReduceLROnPlateau"}


def _adagrad(**extra: Any) -> dict[str, Any]:
    return {"class_path": "torch.optim.Adagrad", "init_args": {"lr": 0.02}, **extra}


def test_what_the_command_line_makes_of_a_scheduler_is_taken() -> None:
    scheduler = Namespace(
        class_path="torch.optim.lr_scheduler.ExponentialLR",
        init_args=Namespace(optimizer=None, gamma=0.5, last_epoch=-1),
        interval="step",
    )
    made = parse_table_optimizer("table_optimizer", _adagrad(lr_scheduler=scheduler))
    config = made.scheduler.build(made.kind([nn.Parameter(torch.zeros(2, 4))], **made.arguments), 0)
    assert (config.interval, config.name, config.reduce_on_plateau) == (
        "step",
        "lr-table_optimizer",
        False,
    )
    assert config.scheduler.gamma == 0.5


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"init_args": {"lr": 1}}, "a dict with class_path is needed"),
        (
            {"class_path": "torch.optim.Adagard"},
            "'torch.optim.Adagard' is not an optimizer; did you mean 'Adagrad'",
        ),
        ({"class_path": "torch.nn.Linear"}, "'torch.nn.Linear' is not an optimizer"),
        ({"class_path": "no.such.Thing"}, "class_path='no.such.Thing' cannot be imported"),
        (
            _adagrad(lr_schedular={}),
            "Adagrad has no argument 'lr_schedular'; did you mean 'lr_scheduler'",
        ),
        (_adagrad(lr=-1), "Adagrad cannot be made with {'lr': -1}: Invalid learning rate"),
        (
            _adagrad(lr_scheduler={"class_path": "torch.optim.SGD"}),
            "is not a learning rate scheduler",
        ),
        (
            _adagrad(lr_scheduler={"class_path": "ConstantLR", "interval": "day"}),
            "interval='day' is not known",
        ),
        (
            _adagrad(lr_scheduler={"class_path": "StepLR"}),
            "lr_scheduler: StepLR cannot be made with {}: .*step_size",
        ),
        (_adagrad(lr_scheduler=PLATEAU), "lr_scheduler: ReduceLROnPlateau needs monitor"),
    ],
)
def test_what_table_optimizer_cannot_be(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message if ".*" in message else re.escape(message)):
        TorchRecShardedStrategy(table_optimizer=value)
    with pytest.raises(ConfigError, match=re.escape("tables['a'].optimizer")):
        TorchRecShardedStrategy(tables={"a": TableOptions(optimizer=value)})


def _take(
    optimizers: list[Any],
    options: dict[str, Any],
    parameters: dict[str, Any],
    automatic: bool = True,
) -> Any:
    parsed = {name: parse_table_optimizer(name, value) for name, value in options.items()}
    return build_table_optimizers(parameters, parsed, optimizers, automatic, {})


def test_tables_leave_groups_and_state_and_alike_ones_share_an_optimizer() -> None:
    tables = {name: nn.Parameter(torch.ones(3, 4)) for name in "abc"}
    layer = nn.Parameter(torch.ones(2))
    groups = [{"params": [("a", tables["a"]), ("layer", layer)]}, {"params": [("b", tables["b"])]}]
    user_optimizer = torch.optim.Adagrad(groups)
    made = _take(
        [user_optimizer], {"a": _adagrad(), "b": _adagrad(), "c": {"class_path": "SGD"}}, tables
    )
    assert [group["params"] for group in user_optimizer.param_groups] == [[layer], []]
    assert [group["param_names"] for group in user_optimizer.param_groups] == [["layer"], []]
    assert list(user_optimizer.state) == [layer]
    assert [(type(own_optimizer.optimizer), own_optimizer.tables) for own_optimizer in made] == [
        (torch.optim.Adagrad, ["a", "b"]),
        (torch.optim.SGD, ["c"]),
    ]


@pytest.mark.parametrize(
    ("kinds", "automatic", "extra", "message"),
    [
        (
            (torch.optim.SGD, torch.optim.SGD),
            False,
            {},
            "configure_optimizers returned 2 optimizers",
        ),
        ((torch.optim.LBFGS,), True, {}, "LBFGS runs several backward passes in a step"),
        (
            (torch.optim.SGD,),
            False,
            {"lr_scheduler": {"class_path": "ConstantLR"}},
            "has an lr_scheduler, and under",
        ),
    ],
)
def test_steps_that_are_not_clear_are_refused(
    kinds: Any, automatic: bool, extra: Any, message: str
) -> None:
    optimizers = [kind([nn.Parameter(torch.ones(2))]) for kind in kinds]
    with pytest.raises(OptimizerError, match=f"table_optimizer for 'a'.*{message}"):
        _take(
            optimizers, {"a": _adagrad(**extra)}, {"a": nn.Parameter(torch.ones(2, 4))}, automatic
        )
