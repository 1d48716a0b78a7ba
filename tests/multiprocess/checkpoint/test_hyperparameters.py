"""Hyperparameters of any type come back from checkpoints, or load_from_checkpoint fails and names
them."""

import enum
import warnings
from datetime import datetime
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.fabric.utilities.data import AttributeDict
from torch import nn

from lightning_distrec import TunedDDPStrategy
from lightning_distrec.checkpoint.hyperparameters import load_safely
from tests.support.drawing_runs import Noisy, SavesAt, Splitting
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks
from tests.support.trainers import DEFAULTS


class Loss(enum.Enum):
    """What a user chooses from."""

    SQUARED, ABSOLUTE = "squared", "absolute"


class Plain(Noisy):
    """Its defaults are other ones than it was given, so that what is not read shows."""

    def __init__(
        self,
        rate: Any = 0.05,
        folder: Any = None,
        loss: Any = Loss.ABSOLUTE,
        when: Any = None,
        layers: Any = (),
        sizes: Any = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()


class WithObjects(Plain):
    """As chemprop's and darts' modules: classes, losses and their settings among
    hyperparameters."""

    def __init__(
        self, criterion: Any = None, optimizer_cls: Any = None, parts: Any = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.save_hyperparameters({
            "criterion": criterion,
            "optimizer_cls": optimizer_cls,
            "parts": parts,
        })


PLAIN: dict[str, Any] = {
    "rate": numpy.float64(0.07),
    "folder": Path("data/clicks"),
    "loss": Loss.SQUARED,
    "when": datetime(2026, 1, 1),
    "layers": [numpy.int64(4), Path("a")],
    "sizes": AttributeDict(hidden=8),
}
OBJECTS: dict[str, Any] = {
    "criterion": nn.HuberLoss(delta=0.3),
    "optimizer_cls": torch.optim.Adam,
    "parts": AttributeDict(cls=nn.GELU, approximate="tanh"),
}


class WithData(Splitting):
    """Its hyperparameters are not checked by Lightning."""

    def __init__(self, transform: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()


def _train(
    folder: str, kind: type[Plain], options: dict[str, Any], checkpoint: dict[str, Any]
) -> tuple[list[str], Any]:
    """Return what was warned of before the first step, and the steps of a resumed run and of the
    first one."""
    first, resumed = kind(**options), kind(**options)
    settings = DEFAULTS | {"enable_checkpointing": True, "limit_val_batches": 0, "max_epochs": 2}
    messages: list[str] = []
    for module, path in ((first, None), (resumed, f"{folder}/it.ckpt")):
        pl.seed_everything(5)
        saves = SavesAt(f"{folder}/{'again' if path else 'it'}.ckpt", "batch", 3)
        trainer = pl.Trainer(
            strategy=TunedDDPStrategy(checkpoint=checkpoint),
            devices=rank_and_num_ranks()[1],
            callbacks=[saves],
            **settings,
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module.load_state_dict(first.state_dict())
            trainer.fit(module, WithData(lambda sample: sample), ckpt_path=path)
        messages += [
            str(warning.message) for warning in caught if "hyperparameters" in str(warning.message)
        ]
    return messages, len(resumed.seen)


FOLDER = {"distributed": True, "async_save": True}
CALLS: dict[str, tuple[Any, ...]] = {
    "plain file": (Plain, PLAIN, {}),
    "objects file": (WithObjects, PLAIN | OBJECTS, {}),
    "objects folder": (WithObjects, PLAIN | OBJECTS, FOLDER),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The folder of the checkpoints, and what was warned of."""
    folder = tmp_path_factory.mktemp("saved")
    calls = {name: (_train, str(folder / name), *call) for name, call in CALLS.items()}
    return folder, run_each_on_ranks(calls, 2)


def test_numbers_paths_members_of_enums_and_dates_come_back(saved: tuple[Path, Any]) -> None:
    loaded = Plain.load_from_checkpoint(saved[0] / "plain file" / "it.ckpt").hparams
    assert loaded == PLAIN
    assert type(loaded.rate) is float
    assert type(loaded.folder) is type(Path())
    assert loaded.loss is Loss.SQUARED


def test_what_is_not_read_by_itself_is_reported_once_before_training_and_does_not_keep_a_run_from_resuming(
    saved: tuple[Path, Any],
) -> None:
    for rank, outcomes in enumerate(saved[1]):
        for name, (messages, num_seen) in outcomes.items():
            assert num_seen > 5, name
            assert len(messages) == (0 if rank else 2), name  # one for each of the two runs
            for message in messages:
                assert "'transform', a builtins.function, cannot be saved" in message
                assert (
                    "'criterion' has torch.nn.modules.loss.HuberLoss" in message
                ) is name.startswith("objects")
                assert (
                    "asks for these by name; load_from_checkpoint(path, weights_only=False)"
                    in message
                )


def test_objects_stand_among_hyperparameters_alone_and_nothing_of_them_is_run(
    tmp_path: Path,
) -> None:
    path = tmp_path / "it.pt"
    for content in (
        {"callbacks": nn.GELU},
        {"loops": [nn.GELU()]},
        nn.GELU(),
        {"hyper_parameters": {}, nn.GELU: 1},
    ):
        torch.save(content, path)
        with pytest.raises(Exception, match="Weights only load failed"):
            load_safely(path)
    torch.save({"hyper_parameters": {"parts": [nn.GELU(), nn.GELU]}}, path)
    (built, kind), name = (
        load_safely(path)["hyper_parameters"]["parts"],
        "torch.nn.modules.activation.GELU",
    )
    assert not isinstance(built, nn.Module)
    assert (built.type_name, kind.type_name) == (name, name)
