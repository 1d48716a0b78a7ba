"""A pytest plugin for Lightning's own tests: puts one strategy in place of "auto" and of
Lightning's DDPStrategy.

LIGHTNING_OWN_STRATEGY: "ddp", "ddp_tuned", "fsdp_tuned" or "torchrec_sharded".
LIGHTNING_OWN_RESULTS: a file of JSON lines, one for each phase of each test. Ranks are forked where
a test spawns them, which saves seconds for each.
"""

import inspect
import json
import os
import re
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

from lightning_distrec import TorchRecShardedStrategy, TunedDDPStrategy, TunedFSDPStrategy
from lightning_distrec.strategies.run.launched_ranks import LAUNCHER_PID
from lightning_distrec.strategies.run.process_runs import PROCESS

OURS: dict[str, Any] = {
    "ddp": DDPStrategy,
    "ddp_tuned": TunedDDPStrategy,
    "fsdp_tuned": TunedFSDPStrategy,
    "torchrec_sharded": TorchRecShardedStrategy,
}
NAME = os.environ["LIGHTNING_OWN_STRATEGY"]
OF_DDP = ("find_unused_parameters", "static_graph")
made: list[str] = []
"""By this test."""
earlier: list[str] = []
"""By tests before it, since the process was last rid of them."""


def in_place_of(inputs: Any, is_auto: bool) -> Any:
    """Return the strategy that replaces the one that a Trainer has chosen, or that one."""
    is_single = (
        is_auto and type(inputs) is SingleDeviceStrategy and inputs.root_device.type == "cpu"
    )
    if type(inputs) is not DDPStrategy and not is_single:
        return inputs
    ddp = getattr(inputs, "_ddp_kwargs", {})
    options = {name: ddp[name] for name in OF_DDP if name in ddp and NAME in ("ddp", "ddp_tuned")}
    if backend := getattr(inputs, "_process_group_backend", None):
        options["process_group_backend"] = backend
    strategy = OURS[NAME](**options)
    if isinstance(inputs, DDPStrategy):
        strategy._start_method = inputs._start_method.replace("spawn", "fork")
        if inputs.parallel_devices:
            strategy.parallel_devices = inputs.parallel_devices
    made.append(type(strategy).__name__)
    return strategy


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "flaky: of pytest-rerunfailures, which would hide a failure")
    # seconds; with 5, every test of one rank would take so long
    _ChildProcessObserver.__init__.__defaults__ = (0.05,)
    choose, init = _AcceleratorConnector._choose_strategy, _AcceleratorConnector._init_strategy

    @wraps(choose)
    def choose_and_note(self: Any) -> Any:
        self.was_auto = True
        return choose(self)

    @wraps(init)
    def init_and_replace(self: Any) -> None:
        init(self)
        self.strategy = in_place_of(self.strategy, getattr(self, "was_auto", False))

    _AcceleratorConnector._choose_strategy = choose_and_note  # type: ignore[method-assign]
    _AcceleratorConnector._init_strategy = init_and_replace  # type: ignore[method-assign]


def pytest_runtest_setup(item: pytest.Function) -> None:
    earlier.extend(made)
    if earlier and re.search(
        "ddp|spawn|fork|multi-process", item.nodeid + inspect.getsource(item.function)
    ):
        # as at the end of a process: ranks that are forked must not inherit its threads
        PROCESS.leave()
        earlier.clear()
    made.clear()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    reason = (
        "" if report.passed else str(getattr(report.longrepr, "reprcrash", None) or report.longrepr)
    )
    line = {
        "test": report.nodeid, "phase": report.when, "outcome": report.outcome, "made": len(made),
        "reason": " ".join(reason.split())[:400], "seconds": round(report.duration, 2),
    }  # fmt: skip
    with Path(os.environ["LIGHTNING_OWN_RESULTS"]).open("a") as file:
        print(json.dumps(line), file=file)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Any:
    # set on purpose for as long as a launching process lives
    os.environ.pop(LAUNCHER_PID, None)
    return (yield)
