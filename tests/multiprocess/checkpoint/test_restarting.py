"""A fit that is started again goes on from the furthest complete checkpoint of its own job, and
from no other's."""

import itertools
import os
import re
import shutil
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_distrec import TorchRecShardedStrategy
from lightning_distrec.cluster.environment import LaunchedRanks
from lightning_distrec.cluster.launched import Launched, MeetingPoint
from lightning_distrec.errors import CheckpointError, ConfigError
from lightning_distrec.strategies.checkpoints import resuming
from lightning_distrec.strategies.checkpoints.resuming import FOLDER
from lightning_distrec.strategies.run import strategy as run_strategy
from lightning_distrec.strategies.run.stopping import StopOptions
from tests.support.click_model import EvaluatedModel, make_batch, rank_loader, seeded
from tests.support.ranks import rank_and_num_ranks, run_on_warm_ranks

STEPS, EPOCHS = 4, 3
ALL = STEPS * EPOCHS


class Died(Exception):
    """The end of a start."""


class Dies(pl.Callback):
    """Raises after a step."""

    def __init__(self, num_steps: int | None, error_type: type[BaseException]) -> None:
        self.num_steps, self.error_type = num_steps, error_type

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.num_steps:
            raise self.error_type


def _environment(job: str, attempt: int) -> LaunchedRanks:
    rank, num_ranks = rank_and_num_ranks()
    point = MeetingPoint("127.0.0.1", (int(os.environ["MASTER_PORT"]),), "test")
    place = {"local_rank": rank, "local_num_ranks": num_ranks, "node": 0, "num_nodes": 1}
    return LaunchedRanks(
        Launched("torchrun", rank, num_ranks, point=point, job=job, attempt=attempt, **place)
    )


def _start(
    folder: Path,
    name: str = "",
    num_steps: int | None = None,
    attempt: int = 0,
    job: str = "",
    resume: str = "auto",
    ckpt_path: Any = None,
    on_exception: bool = False,
    distributed: bool = False,
    error_type: type[BaseException] = Died,
    dirpath: Any = None,
) -> dict[str, Any]:
    """Start a script as a new process would, and return what it did. num_steps: those after which
    it dies."""
    run_strategy.FIT_NUMBERS = itertools.count(1)
    _messages.clear()
    model = seeded(EvaluatedModel, torch.optim.Adagrad, {"lr": 0.1})
    best = ModelCheckpoint(monitor="val_loss", filename="{epoch}", save_top_k=2)
    often = ModelCheckpoint(
        folder / "often" if distributed else dirpath, every_n_train_steps=2, save_top_k=-1, filename="{step}",
        save_on_exception=on_exception,
    )  # fmt: skip
    early = EarlyStopping("val_loss", patience=2)
    strategy = TorchRecShardedStrategy(
        stopping={"run_name": name or None, "resume": resume},
        checkpoint={"distributed": distributed},
    )
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=rank_and_num_ranks()[1],
        plugins=[_environment(job, attempt)],
        default_root_dir=folder,
        logger=CSVLogger(folder),
        max_epochs=EPOCHS,
        callbacks=[best, often, early, Dies(num_steps, error_type)],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    rank = rank_and_num_ranks()[0]
    val = DataLoader([make_batch(50 + rank)], batch_size=None)
    with suppress(Died, SystemExit):
        trainer.fit(model, rank_loader(STEPS, rank), val, ckpt_path=ckpt_path)
    return {
        "losses": model.losses,
        "first": trainer.global_step - len(model.losses),
        "said": " ".join(
            line for line in _messages if "estart" in line or "again" in line or "skipped" in line
        ),
        "best": (
            Path(best.best_model_path).name,
            sorted(Path(path).name for path in best.best_k_models),
        ),
        "folders": {str(best.dirpath), str(often.dirpath)},
        "early": (early.wait_count, float(early.best_score)),
    }


_messages: list[str] = []


def _live(scratch: str, names: list[str]) -> dict[str, Any]:
    """Live through stories one after the other, each in a folder of its own."""
    functions = resuming.rank_zero_info, resuming.rank_zero_warn
    resuming.rank_zero_info = resuming.rank_zero_warn = _messages.append
    try:
        return {name: globals()[f"_{name}"](Path(scratch) / name) for name in names}
    finally:
        resuming.rank_zero_info, resuming.rank_zero_warn = functions


def _alone(folder: Path) -> Any:
    return _start(folder, "a")


def _named(folder: Path) -> Any:
    return [
        _start(folder, "a", num_steps=7),
        _start(folder, "b", num_steps=1),
        _start(folder, "a"),
        _start(folder, "a"),
    ]


def _by_job(folder: Path) -> Any:
    return [
        _start(folder, job="x", num_steps=7),
        _start(folder, job="x", attempt=1),
        _start(folder, job="x", attempt=2),  # it ended, but not all of the program had
        _start(folder, job="x", num_steps=1),
        _start(folder, job="y", num_steps=1, attempt=1),
        _start(folder, job="x", attempt=1, resume="never", num_steps=1),
    ]


def _flip(file: Path, begin: int, size: int = 64) -> None:
    """Flip all bits of some bytes."""
    content = bytearray(file.read_bytes())
    content[begin : begin + size] = bytes(255 - byte for byte in content[begin : begin + size])
    file.write_bytes(content)


def _damaged(folder: Path) -> Any:
    """Four complete checkpoints, of which the furthest three are spoilt in different ways."""
    first = _start(folder, "a", num_steps=9, distributed=True)
    if rank_and_num_ranks()[0] == 0:
        (folder / "often" / "step=8.ckpt" / "rank_1.pt").write_bytes(b"no")
        _flip(folder / "often" / "step=6.ckpt" / "state.pt", 500)
        _flip(folder / "often" / "step=4.ckpt" / "rank_1.safetensors", 700)
        (folder / "often" / ".distrec-unfinished-x").mkdir()
        (folder / "often" / "step=99.ckpt").mkdir()
        for item in folder.rglob("epoch=*.ckpt"):
            shutil.rmtree(item)
    return [first, _start(folder, "a", distributed=True)]


def _damaged_files(folder: Path) -> Any:
    """Single files, of which the furthest is spoilt, and loaded by its path too."""
    first = _start(folder, "a", num_steps=7)
    newest = next(folder.rglob("step=6.ckpt"))
    torch.distributed.barrier()
    if rank_and_num_ranks()[0] == 0:
        with zipfile.ZipFile(newest) as archive:
            tensors = [entry for entry in archive.infolist() if "/data/" in entry.filename]
            largest = archive.read(max(tensors, key=lambda entry: entry.file_size))
        _flip(newest, newest.read_bytes().index(largest))
    second, message = _start(folder, "a"), ""
    try:
        _start(folder, "b", ckpt_path=newest)
    except CheckpointError as error:
        message = str(error)
    return [first, second, message]


def _given(folder: Path) -> Any:
    options = _start(folder / "other", "other", num_steps=3)
    path = next((folder / "other").rglob("step=2.ckpt"))
    return [
        options,
        _start(folder, "a", num_steps=5, ckpt_path=path),
        _start(folder, "a", num_steps=8, ckpt_path=path),
        _start(folder, "b", num_steps=3, ckpt_path=path),
    ]


def _on_exception(folder: Path) -> Any:
    return [_start(folder, "a", num_steps=7, on_exception=True), _start(folder, "a")]


def _lost_record(folder: Path) -> Any:
    first = _start(folder, "a", num_steps=7, distributed=True)
    if rank_and_num_ranks()[0] == 0:
        while (folder / FOLDER).exists():  # the other rank may just be noting how far it came
            shutil.rmtree(folder / FOLDER, ignore_errors=True)
    other = _start(folder, "b", num_steps=1, distributed=True)
    return [first, other, _start(folder, "a", distributed=True)]


def _gone(folder: Path) -> Any:
    first = _start(folder, job="x", num_steps=7)
    torch.distributed.barrier()
    if rank_and_num_ranks()[0] == 0:
        while folder.exists():  # the other rank may just be noting how far it came
            shutil.rmtree(folder, ignore_errors=True)
    torch.distributed.barrier()
    return [first, _start(folder, job="x", attempt=1, num_steps=1)]


def _by_hand(folder: Path) -> Any:
    interrupted = {"num_steps": 7, "error_type": KeyboardInterrupt}
    return [
        _start(folder / "x", job="x", **interrupted),
        _start(folder / "x", job="x", num_steps=1),
        _start(folder / "a", "a", **interrupted),
        _start(folder / "a", "a", num_steps=8),
    ]


def _elsewhere(folder: Path) -> Any:
    options = {"job": "x", "dirpath": "memory://elsewhere", "num_steps": 3}
    return [_start(folder, **options), _start(folder, attempt=1, **options)]


def _lived(folder: Path, *names: str) -> list[dict[str, Any]]:
    """Return what became of stories, on each of two ranks."""
    return run_on_warm_ranks(_live, 2, str(folder), list(names))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The run that never stopped, on each of two ranks."""
    return [ranks["alone"] for ranks in _lived(tmp_path_factory.mktemp("alone"), "alone")]


def _firsts(starts: list[dict[str, Any]]) -> list[int]:
    return [start["first"] for start in starts]


def test_a_run_started_again_with_its_name_is_the_run_that_never_stopped(
    alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    for single, rank_results in zip(alone, _lived(tmp_path, "named"), strict=True):
        first, other, second, third = rank_results["named"]
        assert _firsts([first, other, second, third]) == [0, 0, 6, 12]
        assert first["losses"] == single["losses"][:7]
        assert second["losses"] == single["losses"][6:]
        assert (second["best"], second["early"]) == (single["best"], single["early"])
        assert first["folders"] == second["folders"]
        assert len(first["folders"]) == 1
        assert "started again" in second["said"].lower()
        assert (
            "step=6.ckpt, step 6, the furthest complete checkpoint of the job run-a-fit1"
            in second["said"]
        )
        assert "The job had come to step 7: 1 step is trained again" in second["said"]
        assert third["losses"] == []


@pytest.mark.slow
def test_a_job_restarted_by_its_launcher_goes_on_and_a_new_start_after_its_end_begins_again(
    alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    lived = _lived(tmp_path, "by_job")
    for single, rank_results in zip(alone, lived, strict=True):
        starts = rank_results["by_job"]
        assert _firsts(starts) == [0, 6, ALL, 0, 0, 0]
        assert "Restarted (torchrun, attempt 1): training resumes from" in starts[1]["said"]
        assert starts[0]["losses"][:6] + starts[1]["losses"] == single["losses"]
        assert "The fit had come to its end" in starts[2]["said"] or rank_results is not lived[0]
        assert starts[3]["said"] == ""
        assert "attempt 1): training starts at step 0. The job y-" in starts[4]["said"]
        assert "because of stopping={'resume': 'never'}" in starts[5]["said"]


def test_damaged_and_unfinished_checkpoints_are_skipped_with_a_line_each(
    alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    lived = _lived(tmp_path, "damaged", "damaged_files")
    for single, rank_results in zip(alone, lived, strict=True):
        for story, first_step in (("damaged", 2), ("damaged_files", 4)):
            first, second = rank_results[story][:2]
            assert _firsts([first, second]) == [0, first_step]
            assert first["losses"][:first_step] + second["losses"] == single["losses"]
        message = rank_results["damaged_files"][2]
        assert re.search(
            r"step=6.ckpt is damaged: archive/data/\d+ in step=6.ckpt does not match", message
        ), message
    message = lived[0]["damaged"][1]["said"]
    for case in (
        "step=8.ckpt is damaged: rank_1.pt has 2 bytes",
        "step=6.ckpt is damaged: state.pt does not match its checksum",
        "step=4.ckpt is damaged: rank_1.safetensors does not match its checksum",
        "step=99.ckpt",
    ):
        assert case in message
    assert "A checkpoint of this job is skipped: " in lived[0]["damaged_files"][1]["said"]
    assert ".distrec-unfinished-x was never completed" in message


FIRSTS = {
    "given": ([0, 2, 4, 2], 2, "step=2.ckpt' was for its first start"),
    "on_exception": ([0, 6], 1, ""),
    "by_hand": ([0, 0, 0, 6], 3, ""),
    "lost_record": ([0, 0, 6], 2, "not known"),
}
"""Story -> the first step of each start, and what one of them says."""


@pytest.mark.slow
def test_a_start_goes_on_from_what_is_the_jobs_own(tmp_path: Path) -> None:
    for rank_results in _lived(tmp_path, *FIRSTS):
        for story, (first_steps, number, text) in FIRSTS.items():
            starts = rank_results[story]
            assert [start["first"] for start in starts] == first_steps, story
            assert text in starts[number]["said"], story


@pytest.mark.slow
def test_a_restart_names_the_checkpoint_that_is_on_no_file_system(tmp_path: Path) -> None:
    first, second = _lived(tmp_path, "elsewhere")[0]["elsewhere"]
    assert (first["first"], second["first"]) == (0, 0)
    path = "Set ckpt_path to memory://elsewhere/step=2.ckpt, which this job has"
    assert f"training starts at step 0. {path}" in second["said"]


@pytest.mark.slow
def test_a_job_whose_folder_is_gone_starts_at_step_0(tmp_path: Path) -> None:
    first, second = _lived(tmp_path, "gone")[0]["gone"]
    assert (first["first"], second["first"]) == (0, 0)
    assert "has no complete checkpoint" in second["said"]


def test_checkpoints_of_other_jobs_are_not_a_jobs_own(tmp_path: Path) -> None:
    own, other, nameless = (resuming.JobFit(str(tmp_path), job) for job in ("x", "y", ""))
    for fit in (own, other):
        fit.begin("@its-start")
    assert own.has_label(own.label), "nothing is known of its start"
    assert not own.has_label(other.label)
    assert not nameless.has_label(nameless.label)


def test_a_name_that_is_no_files_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="run_name='a/b': it becomes part of a file's name"):
        StopOptions(run_name="a/b")
    monkeypatch.setenv("LIGHTNING_DISTREC_RUN_NAME", "from the environment")
    assert resuming.run_name("mine") == "mine"
    with pytest.raises(ConfigError, match="run_name='from the environment'"):
        resuming.run_name(None)
