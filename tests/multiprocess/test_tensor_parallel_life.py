"""What a run with layers that are split lives through: checkpoints, further runs, signals, and an ordinary end."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.nn import functional

from lightning_distrec import TunedDDPStrategy, TunedFSDPStrategy
from lightning_distrec.checkpoint.tools.export import export
from tests.support.dense_models import samples
from tests.support.ranks import RankFailed, rank_and_num_ranks, run_each_on_ranks, run_on_ranks, run_on_warm_ranks
from tests.support.split_models import PLANS, SmallGPT, seeded
from tests.support.trainers import DEFAULTS

SPLIT = {"tensor_parallel": {"size": 2, "plan": PLANS["SmallGPT"]}, "min_num_parameters": 8}


def _trainer(strategy: Any, **settings: Any) -> pl.Trainer:
    options = DEFAULTS | {"max_epochs": 2, "limit_val_batches": 0, "precision": "64-true"} | settings
    return pl.Trainer(strategy=strategy, devices=rank_and_num_ranks()[1], **options)


def _saved(folder: str, kind: str, options: dict[str, Any]) -> list[float]:
    """Losses of a run that saves in the middle of its second epoch."""
    model = seeded(kind)
    saving = ModelCheckpoint(folder, every_n_train_steps=8, save_top_k=-1, filename="{step}")
    _trainer(TunedFSDPStrategy(**SPLIT, **options), callbacks=[saving], enable_checkpointing=True).fit(model)
    return model.losses


def _saved_twice(folder: str, kind: str) -> list[float]:
    _saved(f"{folder}/file", kind, {"checkpoint": {"distributed": False}})
    return _saved(f"{folder}/folder", kind, {"checkpoint": {"single_file_below": 0, "async_save": True}})


def _resumed(path: str, kind: str, strategy: str) -> list[float]:
    pl.seed_everything(9)
    model = type(seeded(kind))()
    strategies: dict[str, Any] = {
        "split": TunedFSDPStrategy(**SPLIT),
        "sharded": TunedFSDPStrategy(min_num_parameters=8),
        "replicated": TunedDDPStrategy(),
    }
    _trainer(strategies[strategy]).fit(model, ckpt_path=path)
    return model.losses


def _check_file(path: str, kind: str, loss: float) -> None:
    """Assert that an ordinary module takes the weights of a file, and has this loss in the third step of an epoch."""
    model = seeded(kind).double()
    model.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    inputs, targets = (tensor.double() for tensor in samples()[16:24])
    torch.manual_seed(2)
    assert float(functional.mse_loss(model(inputs), targets)) == pytest.approx(loss, rel=1e-6)


def test_a_run_goes_on_split_or_not_and_in_one_process(tmp_path: Path) -> None:
    straight, *_ = run_on_warm_ranks(_saved, 2, str(tmp_path), "Dropping", {"checkpoint": {"distributed": False}})
    file = f"{tmp_path}/step=8.ckpt"
    assert Path(file).is_file()
    for losses in run_on_warm_ranks(_resumed, 2, file, "Dropping", "split"):
        assert losses == pytest.approx(straight[8:], rel=1e-9)
    _check_file(file, "Dropping", straight[8])


@pytest.mark.slow
def test_checkpoints_of_two_groups_load_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    straight, *_ = run_on_ranks(_saved_twice, 4, str(tmp_path), "SmallGPT")
    folder = f"{tmp_path}/folder/step=8.ckpt"
    assert Path(folder).is_dir()
    calls: dict[str, tuple[Any, ...]] = {
        name: (_resumed, folder, "SmallGPT", name) for name in ("split", "sharded", "replicated")
    }
    for num_ranks in (4, 2, 1):
        calls = calls if num_ranks > 1 else {"replicated": calls["replicated"]}
        for name, losses in run_each_on_ranks(calls, num_ranks)[0].items():
            assert losses == pytest.approx(straight[8:], rel=1e-6), f"{name} on {num_ranks}"
    _check_file(f"{tmp_path}/file/step=8.ckpt", "SmallGPT", straight[8])
    export(Path(folder), tmp_path / "exported.ckpt")
    _check_file(f"{tmp_path}/exported.ckpt", "SmallGPT", straight[8])


def _lived() -> dict[str, Any]:
    """Fit twice, look at parameters, and become ordinary again."""
    model = seeded("SmallGPT")
    _trainer(TunedFSDPStrategy(**SPLIT), max_epochs=1, limit_train_batches=2).fit(model)
    strategy = TunedFSDPStrategy(**SPLIT)
    trainer = _trainer(strategy, limit_train_batches=2)
    trainer.fit(model)
    full = {name: value.clone() for name, value in strategy.full_state_dict().items()}
    norms = {name: strategy.full_parameter(name) for name in ("blocks.0.attention.query.weight", "head.weight")}
    storages = [p.to_local().untyped_storage() for p in model.blocks.parameters()]  # type: ignore[operator]
    bytes_held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    inputs = torch.linspace(-1, 1, 24, dtype=torch.float64).view(2, 12)
    model.eval()
    with torch.no_grad():
        split = model(inputs)
    predicted = trainer.predict(model, torch.utils.data.DataLoader([[inputs]], batch_size=None))
    strategy.unshard()
    with torch.no_grad():
        ordinary = model.double()(inputs)
    left = [name for name, part in model.named_modules() if "forward" in vars(part) or part._forward_hooks]
    return {
        **{"losses": model.losses, "full": full, "norms": norms, "bytes": bytes_held, "split": split, "left": left},
        **{"ordinary": ordinary, "predicted": predicted, "state": dict(model.state_dict())},
    }


def test_a_module_is_fitted_twice_looked_at_and_becomes_ordinary_again() -> None:
    for rank, of_rank in enumerate(run_on_warm_ranks(_lived, 2)):
        alone = seeded("SmallGPT")
        for epochs in (1, 2):
            options = DEFAULTS | {"limit_val_batches": 0, "precision": "64-true", "max_epochs": epochs}
            pl.Trainer(**options, limit_train_batches=2).fit(alone)
        assert of_rank["losses"] == pytest.approx(alone.losses, rel=1e-9)
        state: dict[str, Tensor] = alone.state_dict()
        for name, value in of_rank["norms"].items():
            torch.testing.assert_close(value, state[name])
        for name, value in (of_rank["full"] if rank == 0 else {}).items():
            torch.testing.assert_close(value, state[name])
        assert list(of_rank["state"]) == list(state)
        torch.testing.assert_close(of_rank["split"], of_rank["ordinary"])
        torch.testing.assert_close(of_rank["state"]["blocks.1.mlp.down.weight"], state["blocks.1.mlp.down.weight"])
        torch.testing.assert_close(of_rank["predicted"][0], of_rank["ordinary"])
        assert of_rank["left"] == []
        assert of_rank["bytes"] < 0.6 * sum(p.nbytes for p in alone.blocks.parameters())  # type: ignore[operator]


def _averaged() -> dict[str, Tensor]:
    model = seeded("SmallGPT")
    trainer = _trainer(TunedFSDPStrategy(**SPLIT), callbacks=[WeightAveraging(use_buffers=False)])
    trainer.fit(model)
    return {name: value.clone() for name, value in trainer.strategy.full_state_dict().items()}


@pytest.mark.slow
def test_averages_of_weights_are_those_of_one_process() -> None:
    ours, *_ = run_on_warm_ranks(_averaged, 2)
    alone = seeded("SmallGPT")
    options = DEFAULTS | {"limit_val_batches": 0, "precision": "64-true", "max_epochs": 2}
    pl.Trainer(**options, callbacks=[WeightAveraging(use_buffers=False)]).fit(alone)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(ours[name], value, msg=name)


def _interrupted(number: int) -> tuple[int, str]:
    class Interrupted(SmallGPT):
        def on_train_batch_end(self, *_: Any) -> None:
            if self.global_step == 3 and self.global_rank == 1:
                os.kill(os.getpid(), number)

    trainer = _trainer(TunedFSDPStrategy(**SPLIT))
    try:
        trainer.fit(Interrupted())
    except SIGTERMException as stop:
        return trainer.global_step, type(stop).__name__
    return trainer.global_step, "no signal"


def test_a_signal_to_one_rank_stops_all_after_the_same_step() -> None:
    one, other = run_on_warm_ranks(_interrupted, 2, signal.SIGTERM)
    assert one == other
    assert 3 <= one[0] <= 6
    assert one[1] == "SIGTERMException"


@pytest.mark.slow
def test_a_dead_rank_ends_the_others() -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1"):
        run_on_ranks(_interrupted, 2, signal.SIGKILL, timeout_seconds=60)
    assert time.monotonic() - began < 40
