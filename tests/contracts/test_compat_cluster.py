"""The private names of Lightning's that the choice of a cluster environment goes by."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from lightning_distrec._compat import lightning as _lightning
from lightning_distrec._compat import lightning_checkpoints, lightning_launchers
from lightning_distrec._compat import torch as _torch
from tests.support.trainers import one_process_trainer


class Chosen(LightningEnvironment):
    """As it was chosen."""


def environment_of(strategy: Any, **options: Any) -> Any:
    return one_process_trainer(strategy, **options).strategy.cluster_environment


def test_override_environment_choice_applies_to_our_strategies_only() -> None:
    with _lightning.override_environment_choice(
        lambda strategy: isinstance(strategy, DDPStrategy), Chosen
    ):
        assert type(environment_of(DDPStrategy())) is Chosen
        assert type(environment_of("ddp")) is LightningEnvironment
        passed = LightningEnvironment()
        assert environment_of(DDPStrategy(), plugins=passed) is passed
    assert type(environment_of(DDPStrategy())) is LightningEnvironment


def test_resume_from_decides_the_checkpoint_of_a_fit_and_of_nothing_else(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    (tmp_path / "hpc_ckpt_3.ckpt").write_text("another job's")
    trainer = one_process_trainer(default_root_dir=tmp_path)
    assert lightning_checkpoints.resumed_path(trainer) is None
    select = trainer._checkpoint_connector._select_ckpt_path
    model = {"model_provided": True, "model_connected": True}
    assert select(TrainerFn.FITTING, None, **model).endswith("_3.ckpt")
    requests = []
    for result, given_values in (("mine.ckpt", "mine.ckpt"), (None, "given.ckpt")):
        with lightning_checkpoints.resume_from(
            trainer, lambda inputs, result=result: requests.append(inputs) or result
        ):
            select = trainer._checkpoint_connector._select_ckpt_path
            assert (
                select(TrainerFn.FITTING, None, **model)
                == lightning_checkpoints.resumed_path(trainer)
                == result
            )
            assert select(TrainerFn.FITTING, "given.ckpt", **model) == given_values
            assert select(TrainerFn.TESTING, "given.ckpt", **model) == "given.ckpt"
        assert lightning_checkpoints.resumed_path(trainer) is None
    trainer.ckpt_path = "set.ckpt"
    with lightning_checkpoints.resume_from(trainer, requests.append):
        assert (
            trainer._checkpoint_connector._select_ckpt_path(TrainerFn.FITTING, None, **model)
            == "set.ckpt"
        )
    assert requests == [None, "given.ckpt", None, "given.ckpt", "set.ckpt"]


def test_the_groups_store_is_found_and_their_exchanges_are_counted() -> None:
    store = dist.HashStore()
    store.set("of", "this test")
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        initial = store.num_keys()
        assert _torch.default_store().add("left", 2) == 2
        assert store.num_keys() == initial + 1
        dist.all_reduce(torch.zeros(1))
        group = dist.new_group(backend="gloo")
        dist.broadcast(torch.zeros(1), 0, group=group)
        dist.broadcast(torch.zeros(1), 0, group=group)
        assert _torch.collective_counts() == [1, 2]
    finally:
        dist.destroy_process_group()


class EndsRun(Callback):
    """Undoes, at the end of a run, what was done at its start."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.patches = _lightning.ignore_signal_after_run(trainer, signal.SIGUSR1)
        self.during = signal.getsignal(signal.SIGUSR1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.patches.close()


def test_a_signal_is_ignored_after_a_run_until_the_next_begins() -> None:
    ends = EndsRun()
    try:
        for _ in range(2):
            one_process_trainer(max_steps=1, callbacks=[ends]).fit(BoringModel())
            assert ends.during is signal.SIG_DFL
            os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)


class Bias(LightningModule):
    """One number."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))


class SaysWhere(Callback):
    """Notes in which process hooks are called; its state is the loss of a run."""

    loss, failed_in = 0.0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss = state["loss"]

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        SaysWhere.failed_in = os.getpid()


class LoadsNothing(SaysWhere):
    """As Lightning's SpikeDetection, whose state cannot be loaded."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AttributeError("has no attribute 'running'")


def test_fork_launcher_takes_over_what_rank_0_has_trained_and_raises_what_a_rank_has_raised() -> (
    None
):
    says, module = SaysWhere(), Bias()
    trainer = one_process_trainer(DDPStrategy(start_method="fork"), devices=2, max_steps=1)
    trainer.callbacks = [LoadsNothing(), says]
    strategy: Any = trainer.strategy
    strategy._launcher = launcher = lightning_launchers.ForkLauncher(
        strategy,
        strategy.set_world_ranks,
        lambda: {**module.state_dict(), "more": torch.ones(1)},
        lambda: None,
    )
    strategy.connect(module)
    trainer.state.fn, outside = TrainerFn.FITTING, os.getpid()

    def train() -> str:
        assert launcher.is_rank
        assert os.getpid() != outside
        nn.init.constant_(module.bias, 3.0)
        says.loss = 0.25
        trainer.callback_metrics["loss"] = torch.tensor(0.25)
        return "x" * 200_000  # more than a pipe takes

    with pytest.warns(
        UserWarning, match="LoadsNothing has not in this process what it has on the ranks"
    ):
        assert len(trainer.strategy.launcher.launch(train, trainer=trainer)) == 200_000
    assert module.bias.item() == 3.0
    assert says.loss == trainer.callback_metrics["loss"].item() == 0.25
    assert launcher.missing_names == ("more",)
    assert launcher.has_trained
    assert not launcher.is_rank

    def fail() -> None:
        if strategy.global_rank == 1:
            raise ValueError("on purpose")

    trainer.state.fn = TrainerFn.VALIDATING
    with pytest.raises(ValueError, match="on purpose"):
        launcher.launch(fail, trainer=trainer)
    assert trainer.callbacks == [], "the hooks of the ranks would be called here too"
    launcher.after_failure()
    assert says in trainer.callbacks
    launcher.kill(0)


def test_check_cuda_before_fork_raises_where_cuda_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lightning_launchers.check_cuda_before_fork()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(RuntimeError, match="forked subprocess"):
        lightning_launchers.check_cuda_before_fork()


@patch.dict(os.environ)
def test_lightnings_launcher_starts_ranks_by_the_function_of_ranks_started_by() -> None:
    for name in ("MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    launcher = _SubprocessScriptLauncher(LightningEnvironment(), num_processes=3, num_nodes=1)
    started: list[tuple[str, str | None]] = []

    def start(command: list[str], env: dict[str, str], cwd: str | None) -> int:
        assert command[0] == sys.executable
        started.append((env["LOCAL_RANK"], cwd))
        return len(started)

    with lightning_launchers.ranks_started_by(start):
        launcher._call_children_scripts()
    assert started == [("1", None), ("2", None)]
    assert launcher.procs == [1, 2]
    assert lightning_launchers.subprocess_script.subprocess is subprocess
