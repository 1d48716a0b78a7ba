"""`distrec_auto` is the strategy that it takes: same losses, same weights, the same class in the Trainer."""

import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import yaml
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor

from lightning_distrec import AutoStrategy, TorchRecShardedStrategy
from lightning_distrec.errors import ConfigError
from tests.support.advised_models import KINDS, batches
from tests.support.embedding_models import loader, whole_state
from tests.support.limits import LIMIT_SECONDS
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_each_on_ranks, run_on_ranks
from tests.support.trainers import DEFAULTS
from tests.support.variables import environment

ROOT = Path(__file__).resolve().parents[2]

STEPS = 4
HYBRID = "torchrec_sharded with dense: fsdp"
CHOSEN = {
    "Wide": ("ddp_tuned", {}),
    "Wide, little memory": ("fsdp_tuned", {"memory_bytes_per_rank": 60_000_000}),
    "WithTable": ("torchrec_sharded", {}),
    "WithBags": ("torchrec_sharded", {}),
    "WithLayers": (HYBRID, {"memory_bytes_per_rank": 72_000_000}),
}


class Told(logging.Handler):
    """Keeps what Lightning's log says."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _fit(kind: str, strategy: Any, times: int = 1, **options: Any) -> tuple[str, list[float], dict[str, Tensor], list]:
    pl.seed_everything(5)
    rank, num_ranks = rank_and_num_ranks()
    model, told = KINDS[kind](), Told()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addHandler(told)
    trainer = pl.Trainer(strategy=strategy, devices=num_ranks, **(DEFAULTS | options))
    for _ in range(times):
        trainer.fit(model, loader(batches(rank, STEPS)))
        trainer.fit_loop.epoch_progress.reset()
    logging.getLogger("lightning.pytorch.utilities.rank_zero").removeHandler(told)
    lines = [line for line in told.lines if line.startswith("distrec_auto")]
    return trainer.strategy.strategy_name, model.losses, whole_state(model), lines


def _both(case: str, **options: Any) -> Any:
    name, arguments = CHOSEN[case]
    kind = case.partition(",")[0]
    return (
        _fit(kind, AutoStrategy(**arguments) if arguments else "distrec_auto", **options),
        _fit(kind, _by_name(name), **options),
    )


def _by_name(name: str) -> Any:
    return TorchRecShardedStrategy(dense="fsdp", memory_bytes_per_rank=72_000_000) if name == HYBRID else name


def test_losses_and_weights_are_those_of_the_strategy_that_is_taken() -> None:
    for rank, results in enumerate(run_each_on_ranks({case: (_both, case) for case in CHOSEN}, 2, 100)):
        for case, (ours, other) in results.items():
            assert ours[0] == other[0] == CHOSEN[case][0].partition(" ")[0], case
            assert ours[1] == other[1], case
            assert len(ours[1]) == STEPS
            assert all(torch.equal(value, other[2][name]) for name, value in ours[2].items()), case
            assert rank or ours[2].keys() == other[2].keys(), case
            assert len(ours[3]) == (1 if rank == 0 else 0)
            assert other[3] == []
        if rank == 0:
            said = results["Wide, little memory"][0][3][0]
            assert said.startswith("distrec_auto: fsdp_tuned, because the whole module, 49.2 MiB, takes more than 80%")


def _twice(case: str) -> Any:
    name, _ = CHOSEN[case]
    return _fit(case, "distrec_auto", times=2), _fit(case, StrategyRegistry.get(name), times=2)


def test_a_second_fit_with_the_same_trainer_goes_on_with_the_strategy() -> None:
    for results in run_each_on_ranks({case: (_twice, case) for case in ("Wide", "WithTable")}, 2, 100):
        for case, (ours, other) in results.items():
            assert (ours[0], len(ours[1])) == (CHOSEN[case][0], 2 * STEPS)
            assert ours[1] == other[1], case
            assert len(ours[3]) <= 1, "the choice was made twice"


def _another_trainer(case: str) -> list[tuple[str, list[float]]]:
    name, little_memory = CHOSEN[case]
    rank, num_ranks = rank_and_num_ranks()
    found = []
    for is_auto in (True, False):
        pl.seed_everything(5)
        model = KINDS[case.partition(",")[0]]()
        for memory in (little_memory, {}):
            strategy = AutoStrategy(**memory) if is_auto else StrategyRegistry.get(name)
            trainer = pl.Trainer(strategy=strategy, devices=num_ranks, **DEFAULTS)
            trainer.fit(model, loader(batches(rank, STEPS)))
        found.append((trainer.strategy.strategy_name, model.losses))
    return found


def test_another_trainer_goes_on_with_the_strategy_that_has_sharded_the_module() -> None:
    cases = {case: (_another_trainer, case) for case in ("Wide, little memory", "WithTable")}
    for results in run_each_on_ranks(cases, 2, 100):
        for case, (ours, other) in results.items():
            assert ours == other, case
            assert (ours[0], len(ours[1])) == (CHOSEN[case][0], 2 * STEPS)


def _evaluate_first() -> tuple[str, list[float]]:
    pl.seed_everything(5)
    rank, num_ranks = rank_and_num_ranks()
    model = KINDS["WithTable"]()
    model.validation_step = lambda batch, batch_idx: model.log("x", model(batch).mean(), sync_dist=True)
    trainer = pl.Trainer(strategy="distrec_auto", devices=num_ranks, precision="bf16-mixed", **DEFAULTS)
    trainer.validate(model, loader(batches(rank, 2)), verbose=False)
    trainer.fit(model, loader(batches(rank, STEPS)))
    return trainer.strategy.strategy_name, [type(trainer.precision_plugin).__name__, len(model.losses)]


def test_a_validation_before_the_fit_chooses_too_and_plugins_stay() -> None:
    for found in run_on_ranks(_evaluate_first, 2):
        assert found == ("torchrec_sharded", ["MixedPrecision", STEPS])


def test_the_arguments_are_those_of_all_three_and_refused_as_early() -> None:
    with pytest.raises(ConfigError, match="timeout_seconds=0: must be above 0"):
        AutoStrategy(timeout_seconds=0)
    with pytest.raises(ConfigError, match="uneven_inputs"):
        AutoStrategy(uneven_inputs="wait")  # type: ignore[arg-type]


def _fails() -> None:
    _fit("Wide", AutoStrategy(memory_bytes_per_rank=-1))


def test_what_fails_on_rank_0_is_raised_on_all() -> None:
    with pytest.raises(RankFailed) as failed:
        run_on_ranks(_fails, 2)
    assert str(failed.value).count("memory_bytes_per_rank=-1: must be above 0.") >= 2


def _fit_by_console(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [
            *(str(Path(sys.executable).parent / "lightning-distrec"), "fit"),
            *("--config", "recipes/next_character/cpu.yaml", *arguments),
            *(f"--trainer.logger.init_args.save_dir={folder}", "--trainer.max_epochs=1"),
            *("--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"),
            "--trainer.callbacks+=tests.support.telling.TellsStrategy",
        ],
        cwd=ROOT,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_console_script_takes_it_by_name(tmp_path: Path) -> None:
    said = _fit_by_console(tmp_path / "name", "--config", "recipes/strategies/distrec_auto.yaml")
    assert said.count("trained by TunedDDPStrategy") == 2
    assert said.count("distrec_auto: ddp_tuned, because all of the module, 1.8 MiB, is within 80% of a rank's") == 1


def test_the_console_script_takes_it_by_class(tmp_path: Path) -> None:
    by_class = tmp_path / "auto.yaml"
    chosen = {"class_path": "lightning_distrec.AutoStrategy", "init_args": {"memory_bytes_per_rank": 2_000_000}}
    by_class.write_text(yaml.safe_dump({"trainer": {"strategy": chosen}}))
    said = _fit_by_console(tmp_path / "class", "--config", str(by_class))
    assert said.count("trained by TunedFSDPStrategy") == 2
