"""Small checkpoints are one plain file: for torch.load, load_from_checkpoint, stock Lightning, and
our own ranks."""

import os
import resource
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_distrec import TorchRecShardedStrategy, TunedDDPStrategy, TunedFSDPStrategy
from lightning_distrec.checkpoint import single_file
from lightning_distrec.checkpoint.contents import verify
from lightning_distrec.checkpoint.save import wait_for_checkpoint
from lightning_distrec.errors import CheckpointError
from lightning_distrec.serving.describe import describe
from tests.support.embedding_models import loader, pairs
from tests.support.plain_checkpoints import plain_checkpoint
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_warm_ranks
from tests.support.resuming import differences
from tests.support.trainers import DEFAULTS

STEPS = 4
KINDS: dict[str, tuple[type, dict[str, Any]]] = {
    "torchrec": (TorchRecShardedStrategy, {"convert_embeddings": "all"}),
    "ddp": (TunedDDPStrategy, {}),
    "fsdp": (TunedFSDPStrategy, {"min_num_parameters": 1}),
}


class Ratings(pl.LightningModule):
    """Two ordinary nn.Embeddings and a layer, built from hyperparameters."""

    def __init__(self, dim: int, rate: float = 0.05) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.users, self.films = nn.Embedding(50, dim), nn.Embedding(70, dim)
        self.top = nn.Linear(2 * dim, 1)
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        users, films = batch
        actual = self.top(torch.cat([self.users(users), self.films(films)], 1)).squeeze(1)
        loss = nn.functional.mse_loss(actual, ((users + films) % 3).float())
        self.losses.append(float(loss.detach()))
        self.log("score", float(self.global_step))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.hparams["rate"])


def _trainer(kind: str, checkpoint: dict[str, Any] | None = None, **options: Any) -> pl.Trainer:
    strategy, arguments = KINDS[kind]
    made = strategy(**arguments, checkpoint=checkpoint)
    return pl.Trainer(strategy=made, devices=rank_and_num_ranks()[1], **(DEFAULTS | options))


def _batches(first: int = 0) -> DataLoader:
    rank = rank_and_num_ranks()[0]
    return loader([pairs(step, rank) for step in range(first, first + STEPS)])


def _model() -> Ratings:
    torch.manual_seed(3)
    return Ratings(8)


def _save(folder: str, kind: str, checkpoint: dict[str, Any] | None = None) -> dict[str, Any]:
    """Train for an epoch, save in the default form and as a folder; return what the next epoch
    would have given."""
    model, trainer = _model(), _trainer(kind, checkpoint, max_epochs=2)
    on_first = []

    class Saves(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
            if trainer.current_epoch == 0:
                trainer.save_checkpoint(f"{folder}/{kind}.ckpt")
                on_first.append({
                    key: value.clone() for key, value in trainer.strategy.full_state_dict().items()
                })

    trainer.callbacks.append(Saves())
    trainer.fit(model, _batches())
    return {"first": on_first[0], "losses": model.losses}


def _resume(folder: str, kind: str, saved_as: str) -> list[float]:
    model = _model()
    _trainer(kind, max_epochs=2).fit(model, _batches(), ckpt_path=f"{folder}/{saved_as}.ckpt")
    return model.losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Checkpoints of two ranks after the first of two epochs, one of each kind, and one that is a
    folder."""
    folder = tmp_path_factory.mktemp("saved")
    (folder / "folders").mkdir()
    calls: dict[str, tuple[Any, ...]] = {kind: (_save, str(folder), kind) for kind in KINDS}
    calls["folder"] = (_save, str(folder / "folders"), "torchrec", {"distributed": True})
    return folder, run_each_on_ranks(calls, 2)


def test_every_strategy_writes_one_file_that_loads_in_one_process(
    saved: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, ranks = saved
    for kind in [*KINDS, "folder"]:
        path = folder / "folders" / "torchrec.ckpt" if kind == "folder" else folder / f"{kind}.ckpt"
        assert path.is_dir() == (kind == "folder")
        expected = ranks[0][kind]["first"]
        loaded = Ratings.load_from_checkpoint(path)
        assert loaded.hparams == {"dim": 8, "rate": 0.05}
        assert all(
            torch.equal(value, expected[name]) for name, value in loaded.state_dict().items()
        ), kind
        if kind != "folder":
            content = torch.load(path, weights_only=True)
            assert all(
                torch.equal(value, expected[name]) for name, value in content["state_dict"].items()
            )
            assert verify(path) == []
        actual = describe(path)
        assert (actual.problem, actual.step, actual.num_ranks) == (None, STEPS, 2)
        # Stock Lightning goes on from it, in one process.
        stock = pl.Trainer(**(DEFAULTS | {"max_epochs": 2, "devices": 1}))
        stock.fit(loaded, loader([pairs(step, 0) for step in range(STEPS)]), ckpt_path=path)
        assert stock.global_step == 2 * STEPS
        assert len(loaded.losses) == STEPS
    forms = [plain_checkpoint(folder / name) for name in ("torchrec.ckpt", "folders/torchrec.ckpt")]
    assert differences(*forms, "checkpoint", 0.0) == []


def test_a_file_goes_on_bitwise_on_its_ranks_and_on_any_other_number_of_ranks(
    saved: tuple[Path, Any],
) -> None:
    folder, ranks = saved
    repeated = run_each_on_ranks({kind: (_resume, str(folder), kind, kind) for kind in KINDS}, 2)
    for rank in range(2):
        for kind in KINDS:
            assert repeated[rank][kind] == ranks[rank][kind]["losses"][STEPS:], kind
    # By another strategy, on other ranks: rank 0's batches are the same ones.
    pairs_of_kinds = list(zip(KINDS, [*list(KINDS)[1:], "torchrec"], strict=True))
    other_results = run_each_on_ranks(
        {f"{a} {b}": (_resume, str(folder), a, b) for a, b in pairs_of_kinds}, 3
    )
    for a, b in pairs_of_kinds:
        assert len(other_results[0][f"{a} {b}"]) == STEPS
        # The first loss is of the weights that were saved.
        assert other_results[0][f"{a} {b}"][0] == pytest.approx(
            ranks[0][b]["losses"][STEPS], abs=1e-6
        )


def _forms(folder: str) -> dict[str, Any]:
    """Save in each form under one name, one after the other, and look at what is there."""
    path, actual = Path(folder) / "it.ckpt", {}
    options: dict[str, dict[str, Any]] = {
        "one file": {"distributed": False},
        "large": {},
        "small": {"async_save": True},
    }
    for name, inputs in options.items():
        trainer = _trainer("torchrec", inputs)
        trainer.fit(_model(), _batches())
        with patch.object(single_file, "SINGLE_FILE_BYTES", 10_000 if name == "large" else 2**30):
            trainer.save_checkpoint(path)
        wait_for_checkpoint(path)  # rank 0 of the asynchronous one may still be writing
        trainer.strategy.barrier()
        actual[name] = (path.is_dir(), sorted(os.listdir(folder)))
    trainer = _trainer("ddp", {})
    trainer.fit(_model(), _batches())
    with patch.object(single_file, "SINGLE_FILE_BYTES", 0):
        trainer.save_checkpoint(path)
    actual["nothing is sharded"] = (path.is_dir(), sorted(os.listdir(folder)))
    trainer.strategy.barrier()  # rank 0 removes it, once all have looked
    trainer.strategy.remove_checkpoint(path)
    trainer.strategy.barrier()
    return actual | {"removed": os.listdir(folder)}


def test_the_form_is_chosen_by_size_and_one_form_replaces_the_other(tmp_path: Path) -> None:
    for actual in run_on_warm_ranks(_forms, 2, str(tmp_path)):
        assert actual.pop("removed") == []
        folders = {
            name
            for name, (is_folder, names) in actual.items()
            if is_folder and names == ["it.ckpt"]
        }
        assert folders == {"large"}
        assert all(names == ["it.ckpt"] for _, names in actual.values()), actual


def _fail(folder: str) -> dict[str, Any]:
    """Save at the end of a fit, then again where rank 0's disk is full."""
    path, trainer = Path(folder) / "it.ckpt", _trainer("torchrec")
    trainer.fit(_model(), _batches())
    trainer.save_checkpoint(path)
    old, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    if trainer.is_global_zero:  # EFBIG, as a full disk gives ENOSPC
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        trainer.save_checkpoint(path)
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    trainer.strategy.barrier()
    return {"raised": raised, "same": path.read_bytes() == old, "names": os.listdir(folder)}


def test_a_disk_that_is_full_is_reported_on_all_ranks_and_keeps_the_old_file(
    tmp_path: Path,
) -> None:
    for actual in run_on_warm_ranks(_fail, 2, str(tmp_path)):
        assert actual["raised"].startswith("CheckpointError: ")
        assert "it.ckpt cannot be written: [Errno 27] File too large. " in actual["raised"]
        assert " are free there. Earlier checkpoints are unchanged." in actual["raised"]
        assert (actual["same"], actual["names"]) == (True, ["it.ckpt"])


class Counting(AsyncCheckpointIO):
    """A CheckpointIO of the user's."""

    loads = 0

    def load_checkpoint(self, *args: Any, **options: Any) -> Any:
        self.loads += 1
        return super().load_checkpoint(*args, **options)


def _by_io(path: str, plugins: list[Any]) -> tuple[list[float], str]:
    trainer, resumed = _trainer("torchrec", plugins=plugins), _model()
    trainer.fit(_model(), _batches())
    trainer.save_checkpoint(path)
    trainer.strategy.checkpoint_io.teardown()
    again = _trainer("torchrec", plugins=plugins, max_epochs=2)
    again.fit(resumed, _batches(), ckpt_path=path)
    assert all(plugin.loads for plugin in plugins)
    try:
        again.fit(_model(), _batches(), ckpt_path=f"{path}.none")
    except FileNotFoundError as error:
        return resumed.losses, str(error)
    return resumed.losses, "it was read"


def test_a_checkpoint_io_writes_and_reads_one_file(saved: tuple[Path, Any], tmp_path: Path) -> None:
    calls = {
        "plugin": (_by_io, f"{tmp_path}/it.ckpt", [Counting()]),
        "url": (_by_io, f"file://{tmp_path}/url.ckpt", []),
    }
    for rank, rank_results in enumerate(run_each_on_ranks(calls, 2)):
        for resumed, message in rank_results.values():
            assert resumed == saved[1][rank]["torchrec"]["losses"][STEPS:]
            assert message.startswith("there is no checkpoint ")
    assert Ratings.load_from_checkpoint(tmp_path / "it.ckpt").users.weight.shape == (50, 8)


def _resume_damaged(path: str) -> str:
    try:
        _trainer("torchrec", max_epochs=2).fit(_model(), _batches(), ckpt_path=path)
    except CheckpointError as error:
        return str(error)
    return "it was read"


DAMAGES: dict[str, dict[str, Any]] = {
    "has format 2, and this version of lightning_distrec reads format 1": {"format": 2},
    "is damaged: it lacks the states of its ranks": {"rank_states": []},
    "is damaged: its 'lightning_distrec' is not as it was written": {"optimizers": [{}]},
}


def test_a_damaged_file_is_refused(saved: tuple[Path, Any], tmp_path: Path) -> None:
    path = tmp_path / "it.ckpt"
    content = torch.load(saved[0] / "torchrec.ckpt", weights_only=True)
    for message, change in DAMAGES.items():
        extra = {**content[single_file.EXTRA], **change}
        torch.save({**content, single_file.EXTRA: extra}, path)
        assert f"it.ckpt {message}" in str(describe(path).problem)
        for error in run_on_warm_ranks(_resume_damaged, 2, str(path)):
            assert f"it.ckpt {message}" in error
