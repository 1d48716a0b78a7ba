"""Saving and loading when something goes wrong: all ranks say so, with the reason, and what was
complete stays."""

import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from enum import Enum
from ipaddress import IPv4Address
from pathlib import Path, PurePosixPath
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_distrec.checkpoint import atomic_folder, save
from lightning_distrec.checkpoint.atomic_folder import MARKER, UNFINISHED, is_checkpoint
from lightning_distrec.checkpoint.lazy_tensors import materialized
from lightning_distrec.errors import CheckpointError
from lightning_distrec.serving.export_checkpoint import export
from tests.support.checkpoint_folders import edit_marker
from tests.support.click_model import ClickModel, rank_loader, seeded
from tests.support.parameters import slow_except
from tests.support.plain_checkpoints import load
from tests.support.ranks import rank_and_num_ranks, run_each_on_ranks, run_on_ranks
from tests.support.trainers import make_trainer

KINDS = pytest.mark.parametrize(
    "is_async", slow_except([True], [False, True]), ids=["sync", "async"]
)
TOO_LARGE = {"tensors": 4096, "the rest": 15000}
"""What is written when a file may not be larger than that: the tensors' files have 14.8 kB, the
ranks' own 15.7 kB."""


class Model(ClickModel):
    """A click model that calls what it is told to at a step, keeps what it finds at every step, and
    logs a score."""

    def __init__(
        self, position: dict[int, Callable[[], Any]] | None = None, watch: Path | None = None
    ) -> None:
        super().__init__(torch.optim.Adagrad, {"lr": 0.1})
        self.at, self.watch = position or {}, watch
        self.seconds = 0.0
        """Of each step."""
        self.steps = 0
        self.watched: list[list[str]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.watch is not None:
            self.watched.append(_names(self.watch))
        self.steps = batch_idx + 1
        time.sleep(self.seconds)
        loss = super().training_step(batch, batch_idx)
        self.log("score", float(batch_idx))
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (act := self.at.get(batch_idx + 1)) is not None:
            act()

    def on_train_end(self) -> None:
        pass


def _model(*args: Any, **options: Any) -> Model:
    return seeded(Model, *args, **options)


def _trainer(is_async: bool = False, *callbacks: Any, **options: Any) -> pl.Trainer:
    tables = {"ebc.narrow": {"embedding_update": "dense"}}
    strategy = {
        "checkpoint": {"distributed": True, "async_save": is_async} | options.pop("checkpoint", {}),
        "tables": tables,
    }
    strategy |= {key: options.pop(key) for key in ("prefetch", "tables") if key in options}
    checkpointing = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    return make_trainer(
        strategy, callbacks=list(callbacks), enable_checkpointing=checkpointing, **options
    )


def _fit(trainer: pl.Trainer, model: Model, steps: int, **options: Any) -> str:
    """Return the exception that ended the fit, or ""."""
    try:
        trainer.fit(model, rank_loader(steps, rank_and_num_ranks()[0]), **options)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _names(folder: Path) -> list[str]:
    """Return what is in a folder; all hidden ones have one name."""
    return sorted(
        # A folder has the second name for a moment, until it is locked.
        UNFINISHED if path.name.startswith((UNFINISHED, ".distrec-new-")) else path.name
        for path in folder.iterdir()
    )


def _names_in_the_end(folder: Path) -> list[str]:
    """Collective. The same, once rank 0 has removed what it is removing."""
    torch.distributed.barrier()
    return _names(folder)


def _content(path: Path, rank: int = 0) -> tuple[Any, Any]:
    """Return all that a checkpoint of two ranks holds, read in full."""
    loaded = load(path, rank, 2)

    def read(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: read(item) for key, item in value.items()}
        return (
            type(value)(map(read, value))
            if isinstance(value, (list, tuple))
            else materialized(value)
        )

    return read(loaded.checkpoint), read(loaded.rank_state)


def _step(path: Path) -> int:
    """Return the step that a checkpoint is of, once all of it was read."""
    return _content(path)[0]["global_step"] if path.exists() else 0


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


@contextlib.contextmanager
def _slow(seconds: float) -> Iterator[list[tuple[float, float]]]:
    """Make writes take longer; yields when those began and ended that were done."""
    write, times = save.write_tensors, []

    def slowly(*args: Any, **options: Any) -> Any:
        began = time.monotonic()
        time.sleep(seconds)
        try:
            return write(*args, **options)
        finally:
            times.append((began, time.monotonic()))

    save.write_tensors = slowly
    try:
        yield times
    finally:
        save.write_tensors = write


@contextlib.contextmanager
def _no_limit() -> Iterator[None]:
    """Undo, in the end, what `_limit` did."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def _limit(failing_rank: int, size: int) -> None:
    """Let files of one rank be no larger than that: EFBIG, as a full disk gives ENOSPC."""
    if rank_and_num_ranks()[0] == failing_rank:
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
        )


# ----------------------------------------------------------------------------------------------------- a disk is full


class WithoutTables(Model):
    """Has dense layers only."""

    def configure_model(self) -> None:
        self.ebc = None

    def forward(self, batch: Any) -> Any:
        return self.mlp(batch["label"].unsqueeze(1).expand(-1, 56)).squeeze(-1)


def _disk_full(
    scratch: str,
    is_async: bool,
    failing_rank: int,
    case: str,
    steps: int,
    kind: type[Model] = Model,
    depth: int = 3,
) -> dict[str, Any]:
    """Save at step 2, then to the same name at step 4, when one rank's disk is full."""
    path = (
        _folder(scratch, f"{is_async}-{failing_rank}-{case}-{steps}-{kind.__name__}-{depth}")
        / "it.ckpt"
    )
    trainer = _trainer(
        is_async, prefetch={"depth": depth}, **{} if kind is Model else {"tables": {}}
    )

    def again() -> None:
        if is_async:
            trainer.strategy.session.checkpoints._saver.finish()  # of step 2
        _limit(failing_rank, TOO_LARGE[case])
        trainer.save_checkpoint(path)

    model = seeded(kind, {2: lambda: trainer.save_checkpoint(path), 4: again})
    model.seconds = 0.02 if is_async else 0.0
    with _no_limit():
        raised = _fit(trainer, model, steps)
    return {
        "raised": raised,
        "steps": model.steps,
        "old": _step(path),
        "names": _names_in_the_end(path.parent),
    }


def _folder(scratch: str, name: str) -> Path:
    folder = Path(scratch) / name
    folder.mkdir(exist_ok=True)
    return folder


@KINDS
def test_a_full_disk_of_one_rank_raises_on_all_and_the_old_checkpoint_stays(
    tmp_path: Path, is_async: bool
) -> None:
    further = (60, 4) if is_async else (60,)  # steps after it, or none
    cases: list[Any] = [
        (failing_rank, case, steps)
        for failing_rank in (0, 1)
        for case in TOO_LARGE
        for steps in further
    ]
    cases += [(0, "tensors", 60, Model, 1), (1, "the rest", 60, WithoutTables)]
    calls = {str(case): (_disk_full, str(tmp_path), is_async, *case) for case in cases}
    ranks = run_each_on_ranks(calls, 2)
    for case in cases:
        failing_rank, name, steps = case[:3]
        first, other = (rank_results[str(case)] for rank_results in ranks)
        for actual in (first, other):
            assert actual["raised"].startswith("CheckpointError: "), actual
            assert "File too large" in actual["raised"], actual
            assert "it.ckpt" in actual["raised"], actual
            assert actual["old"] == 2, actual
            assert actual["names"] == ["it.ckpt"], actual
        warned = (other if failing_rank == 0 else first)["raised"]  # to the rank that could write
        assert f"rank {failing_rank}: " in warned, warned
        assert first["steps"] == other["steps"], (first, other)
        assert 4 < first["steps"] < 60 if is_async and steps == 60 else first["steps"] == 4, first


def _disk_full_for_all(folder: str, is_async: bool) -> dict[str, Any]:
    path, trainer = Path(folder) / "it.ckpt", _trainer(is_async)

    def again() -> None:
        if trainer.is_global_zero:
            while not is_checkpoint(path):  # the first may still be on its way
                time.sleep(0.01)
            free = os.statvfs(folder)
            (Path(folder) / "ballast").write_bytes(b"x" * (free.f_bavail * free.f_bsize - 8192))
        trainer.strategy.barrier()
        trainer.save_checkpoint(path)

    raised = _fit(trainer, _model({2: lambda: trainer.save_checkpoint(path), 4: again}), 4)
    return {"raised": raised, "old": _step(path), "names": _names_in_the_end(path.parent)}


@KINDS
def test_a_file_system_without_space_is_reported_on_all_ranks_and_keeps_the_old_checkpoint(
    tmp_path: Path, is_async: bool
) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        for actual in run_on_ranks(_disk_full_for_all, 2, str(tmp_path), is_async):
            assert actual["raised"].startswith("CheckpointError: "), actual
            assert "No space left on device" in actual["raised"], actual
            assert actual["old"] == 2
            assert actual["names"] == ["ballast", "it.ckpt"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def _fails_at_the_end(scratch: str, is_async: bool, case: str) -> dict[str, Any]:
    """The last steps of a write fail on rank 0, the only one that has them."""
    path, trainer = _folder(scratch, f"{is_async}-{case}") / "it.ckpt", _trainer(is_async)
    write_file, exchange = atomic_folder.write_file, atomic_folder._exchange

    def no_marker(file: Path, content: bytes) -> None:
        if file.name == MARKER:
            raise OSError(5, "Input/output error", str(file))
        write_file(file, content)

    def no_exchange(new: Path, old: Path) -> None:
        raise OSError(5, "Input/output error", str(old))

    def again() -> None:
        if is_async:
            trainer.strategy.session.checkpoints._saver.finish()
        if case == "marker":
            atomic_folder.write_file = no_marker
        else:
            atomic_folder._exchange = no_exchange
        trainer.save_checkpoint(path)

    try:
        raised = _fit(trainer, _model({2: lambda: trainer.save_checkpoint(path), 4: again}), 4)
    finally:
        atomic_folder.write_file, atomic_folder._exchange = write_file, exchange
    return {"raised": raised, "old": _step(path), "names": _names_in_the_end(path.parent)}


@KINDS
def test_a_disk_that_fails_at_the_very_end_leaves_the_old_checkpoint(
    tmp_path: Path, is_async: bool
) -> None:
    calls = {
        case: (_fails_at_the_end, str(tmp_path), is_async, case) for case in ("marker", "exchange")
    }
    for rank_results in run_each_on_ranks(calls, 2):
        for actual in rank_results.values():
            assert actual["raised"].startswith("CheckpointError: "), actual
            assert "Input/output error" in actual["raised"], actual
            assert (actual["old"], actual["names"]) == (2, ["it.ckpt"]), actual


def _nowhere(scratch: str, is_async: bool) -> list[str]:
    file = Path(scratch) / "a file"
    file.touch()
    paths = [file / "it.ckpt", file / "further" / "it.ckpt", Path("/proc/nowhere/it.ckpt")]
    actual = []
    for path in paths:
        trainer = _trainer(is_async)
        actual.append(_fit(trainer, _model({2: lambda t=trainer, p=path: t.save_checkpoint(p)}), 4))
    return actual


@KINDS
def test_a_path_that_cannot_be_is_reported_on_every_rank(tmp_path: Path, is_async: bool) -> None:
    for rank_results in run_on_ranks(_nowhere, 2, str(tmp_path), is_async):
        for message, reason in zip(
            rank_results, ["File exists", "Not a directory", "No such file"], strict=True
        ):
            assert message.startswith("CheckpointError: "), message
            assert reason in message
            assert "cannot be written" in message


def _over_a_file(folder: str) -> tuple[int, list[str]]:
    path, trainer = Path(folder) / "it.ckpt", _trainer()
    path.write_text("a checkpoint of another strategy")
    assert not _fit(trainer, _model({2: lambda: trainer.save_checkpoint(path)}), 2)
    return _step(path), _names(path.parent)


def test_a_file_of_the_same_name_is_replaced(tmp_path: Path) -> None:
    assert run_on_ranks(_over_a_file, 2, str(tmp_path)) == [(2, ["it.ckpt"])] * 2


# ------------------------------------------------------------------------------------------- what
# is kept meanwhile


def _top_1(scratch: str, is_async: bool, fails: bool) -> dict[str, Any]:
    folder = _folder(scratch, f"{is_async}-{fails}")
    keep = ModelCheckpoint(
        folder,
        filename="best-{step}",
        monitor="score",
        mode="max",
        save_top_k=1,
        every_n_train_steps=4,
    )
    trainer, model = _trainer(is_async, keep), _model(watch=folder)

    def before_second() -> None:
        if is_async:
            trainer.strategy.session.checkpoints._saver.finish()
        if fails:
            _limit(1, TOO_LARGE["tensors"])

    model.at, model.seconds = {7: before_second}, 0.05
    with _no_limit(), _slow(0.4) as writes:
        raised = _fit(trainer, model, 11 if is_async else 9)
    return {
        "raised": raised,
        "watched": model.watched,
        "names": _names_in_the_end(folder),
        "writes": len(writes),
    }


def test_the_old_best_is_removed_only_once_the_new_one_is_complete(tmp_path: Path) -> None:
    calls = {
        str(case): (_top_1, str(tmp_path), *case)
        for case in [(a, f) for a in (False, True) for f in (False, True)]
    }
    for rank_results in run_each_on_ranks(calls, 2):
        for is_async in (False, True):
            good, bad = rank_results[str((is_async, False))], rank_results[str((is_async, True))]
            assert (good["raised"], good["names"]) == ("", ["best-step=8.ckpt"]), good
            assert bad["raised"].startswith("CheckpointError: "), bad
            assert bad["names"] == ["best-step=4.ckpt"], bad
            assert good["writes"] == 2
            # the write takes longer than the rest of the steps
            for names in good["watched"][8:] if is_async else []:
                assert names == [UNFINISHED, "best-step=4.ckpt"]


def _every_step(folder: str) -> dict[str, Any]:
    keep = ModelCheckpoint(
        folder,
        filename="{step}",
        monitor="score",
        mode="max",
        save_top_k=2,
        every_n_train_steps=1,
        save_last=True,
    )
    model = _model(watch=Path(folder))
    with _slow(0.1) as writes:
        raised = _fit(_trainer(True, keep), model, 5)
    return {
        "raised": raised,
        "watched": model.watched,
        "names": _names_in_the_end(Path(folder)),
        "writes": writes,
    }


def test_at_most_one_checkpoint_is_being_written(tmp_path: Path) -> None:
    for actual in run_on_ranks(_every_step, 2, str(tmp_path)):
        assert not actual["raised"]
        assert actual["names"] == ["last.ckpt", "step=4.ckpt", "step=5.ckpt"]
        assert len(actual["writes"]) == 10
        for (_, ended), (began, _) in zip(actual["writes"], actual["writes"][1:], strict=False):
            assert began >= ended
        assert max(names.count(UNFINISHED) for names in actual["watched"]) == 1
    assert [_step(tmp_path / name) for name in ("last.ckpt", "step=4.ckpt", "step=5.ckpt")] == [
        5,
        4,
        5,
    ]


def _same_names(scratch: str, is_async: bool) -> list[tuple[str, int]]:
    folder = _folder(scratch, str(is_async))
    keep = ModelCheckpoint(
        folder, filename="best", monitor="score", mode="max", save_top_k=2, every_n_train_steps=1
    )
    with _slow(0.2):
        assert not _fit(_trainer(is_async, keep), _model(), 2)
    return [(name, _step(folder / name)) for name in _names_in_the_end(folder)]


def test_names_that_repeat_get_the_same_versions_as_in_synchronous_saving(tmp_path: Path) -> None:
    calls = {str(is_async): (_same_names, str(tmp_path), is_async) for is_async in (False, True)}
    for rank_results in run_each_on_ranks(calls, 2):
        assert rank_results["False"] == [("best-v1.ckpt", 2), ("best.ckpt", 1)]
        assert rank_results["True"] == rank_results["False"]


def _snapshot(scratch: str, is_async: bool) -> int:
    path, trainer = Path(scratch) / f"{is_async}.ckpt", _trainer(is_async)
    save = {3: lambda: trainer.save_checkpoint(path)}
    model = _model(save)
    with _slow(0.5):
        assert not _fit(trainer, model, 12)
    return model.steps


def test_what_an_asynchronous_checkpoint_holds_is_of_the_step_at_which_it_was_saved(
    tmp_path: Path,
) -> None:
    calls = {str(is_async): (_snapshot, str(tmp_path), is_async) for is_async in (False, True)}
    run_each_on_ranks(calls, 2)
    for rank in range(2):
        sync, asynchronous = (
            _content(tmp_path / f"{is_async}.ckpt", rank) for is_async in (False, True)
        )
        assert sync[0]["global_step"] == 3
        assert _same(sync, asynchronous)


def _right_after(scratch: str) -> dict[str, bool]:
    trainer = _trainer(True)
    during, new = Path(scratch) / "during.ckpt", Path(scratch) / "after.ckpt"
    with _slow(0.5):
        assert not _fit(trainer, _model({4: lambda: trainer.save_checkpoint(during)}), 4)
        actual = {"fit": is_checkpoint(during)}
        trainer.save_checkpoint(new)
        actual["save_checkpoint"] = is_checkpoint(new)
        time.sleep(1.5)
        return actual | {"later": is_checkpoint(new)}


def test_the_end_of_fit_and_saving_after_it_wait_for_the_checkpoint(tmp_path: Path) -> None:
    assert (
        run_on_ranks(_right_after, 2, str(tmp_path))
        == [{"fit": True, "save_checkpoint": True, "later": True}] * 2
    )


# ------------------------------------------------------------------------------------ something
# else fails meanwhile


def _user_fails(scratch: str, failing_ranks: tuple[int, ...]) -> dict[str, Any]:
    path, trainer = Path(scratch) / "it.ckpt", _trainer(True)

    def fail() -> None:
        if trainer.global_rank in failing_ranks:
            raise ValueError("the user's code failed")

    began = time.monotonic()
    with _slow(0.7):
        raised = _fit(trainer, _model({3: lambda: trainer.save_checkpoint(path), 5: fail}), 400)
    return {"raised": raised, "complete": is_checkpoint(path), "seconds": time.monotonic() - began}


@pytest.mark.parametrize(
    "failing_ranks",
    slow_except([((1,),)], [((0, 1),), ((0,),), ((1,),)]),
    ids=["all", "the first", "the last"],
)
def test_an_exception_while_a_checkpoint_is_written_is_what_is_seen_and_it_is_written(
    tmp_path: Path, failing_ranks: tuple[int, ...]
) -> None:
    for rank, actual in enumerate(run_on_ranks(_user_fails_alone, 2, str(tmp_path), failing_ranks)):
        if rank in failing_ranks:
            assert actual["raised"] == "ValueError: the user's code failed"
            assert actual["complete"]
        else:
            assert "Error" in actual["raised"]
        assert actual["seconds"] < 60
    assert _step(tmp_path / "it.ckpt") == 3


def _user_fails_alone(scratch: str, failing_ranks: tuple[int, ...]) -> dict[str, Any]:
    """As in a script, a rank that has failed leaves."""
    actual = _user_fails(scratch, failing_ranks)
    if len(failing_ranks) == 1 and rank_and_num_ranks()[0] in failing_ranks:
        from lightning_distrec.strategies.run.process_runs import PROCESS

        PROCESS.leave()
    return actual


def _terminated(scratch: str, failing_rank: int) -> dict[str, Any]:
    path, trainer = Path(scratch) / f"{failing_rank}.ckpt", _trainer(True)

    def stop() -> None:
        if trainer.global_rank == failing_rank:
            os.kill(os.getpid(), signal.SIGTERM)

    model = _model({3: lambda: trainer.save_checkpoint(path), 4: stop})
    with _slow(0.7):
        raised = _fit(trainer, model, 400)
    return {
        "raised": raised,
        "complete": is_checkpoint(path),
        "step": _step(path),
        "steps": model.steps,
    }


def test_sigterm_while_a_checkpoint_is_written_lets_it_become_complete(tmp_path: Path) -> None:
    ranks = run_each_on_ranks(
        {str(failing_rank): (_terminated, str(tmp_path), failing_rank) for failing_rank in (0, 1)},
        2,
    )
    for failing_rank in ("0", "1"):
        first, other = (rank_results[failing_rank] for rank_results in ranks)
        assert first == other
        assert first["raised"].startswith("SIGTERMException")
        assert first["complete"]
        assert first["step"] == 3
        assert first["steps"] < 10


# --------------------------------------------------------------------------------------------------- damage and more


def _save(path: str) -> None:
    trainer = _trainer()
    assert not _fit(trainer, _model({2: lambda: trainer.save_checkpoint(path)}), 3)


def _resume_each(paths: dict[str, str], start_from: bool) -> dict[str, tuple[str, int]]:
    actual = {}
    for name, path in paths.items():
        model = _model()
        trainer = _trainer(checkpoint={"start_from": path} if start_from else {})
        raised = _fit(trainer, model, 2, ckpt_path=None if start_from else path)
        actual[name] = (raised, model.steps)
    return actual


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def _spoil(file: Path) -> None:
    file.write_bytes(b"\0" * file.stat().st_size)


def _later_format(folder: Path) -> None:
    edit_marker(folder, lambda marker: marker.update(format=3))


def _save_as(file: Path, content: Any) -> None:
    torch.save(content, file)
    edit_marker(
        file.parent, lambda marker: marker["files"].update({file.name: file.stat().st_size})
    )


def _forget(folder: Path, name: str) -> None:
    (folder / name).unlink()
    edit_marker(folder, lambda marker: marker["files"].pop(name))


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no marker": (lambda p: (p / MARKER).unlink(), f"is not a complete checkpoint: {MARKER}"),
    "empty marker": (lambda p: (p / MARKER).write_text(""), f"{MARKER} is damaged"),
    "marker is a list": (lambda p: (p / MARKER).write_text("[]"), f"{MARKER} is damaged"),
    "later format": (
        _later_format,
        "has format 3, and this version of lightning_distrec reads format 2",
    ),
    "tensors cut off": (lambda p: _truncate(p / "rank_1.safetensors"), "rank_1.safetensors has "),
    "tensors gone": (
        lambda p: (p / "rank_0.safetensors").unlink(),
        "rank_0.safetensors is missing, and should have ",
    ),
    "tensors are zeros": (
        lambda p: _spoil(p / "rank_1.safetensors"),
        "rank_1.safetensors does not match its checksum",
    ),
    "state cut off": (lambda p: _truncate(p / "state.pt"), "state.pt has "),
    "state is zeros": (lambda p: _spoil(p / "state.pt"), "state.pt does not match its checksum"),
    "a rank's file gone": (lambda p: (p / "rank_1.pt").unlink(), "rank_1.pt is missing"),
    "a rank's file gone, and not listed": (lambda p: _forget(p, "rank_1.pt"), "rank_1.pt"),
    "a rank's file is zeros": (
        lambda p: _spoil(p / "rank_1.pt"),
        "rank_1.pt does not match its checksum",
    ),
    "a rank's file is a list": (lambda p: _save_as(p / "rank_1.pt", [1]), "rank_1.pt"),
    "a rank's file lacks something": (
        lambda p: _save_as(p / "rank_1.pt", {"loaders": [], "generators": {}}),
        "rank_1",
    ),
    "an empty folder": (
        lambda p: [file.unlink() for file in p.iterdir()],
        "is not a complete checkpoint",
    ),
    "other files": (
        lambda p: [file.rename(file.with_suffix(".txt")) for file in p.iterdir()],
        "is not a complete checkpoint",
    ),
}


NEEDED_TO_GO_ON = (
    "a rank's file gone, and not listed",
    "a rank's file is a list",
    "a rank's file lacks something",
)
"""Damages that do not matter where a run starts from the weights only."""


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of step 2 by two ranks."""
    path = tmp_path_factory.mktemp("complete") / "it.ckpt"
    run_on_ranks(_save, 2, str(path))
    return path


@pytest.mark.parametrize(
    "start_from", slow_except([False], [False, True]), ids=["ckpt_path", "start_from"]
)
def test_a_damaged_checkpoint_is_reported_on_every_rank_before_training_starts(
    tmp_path: Path, complete: Path, start_from: bool
) -> None:
    paths = {"complete": str(complete)}
    for name, (damage, _) in DAMAGES.items():
        paths[name] = str(shutil.copytree(complete, tmp_path / name))
        damage(Path(paths[name]))
    ranks = run_on_ranks(_resume_each, 2, paths, start_from)
    for actual in ranks:
        assert actual.pop("complete")[1] > 0
        for name, (message, steps) in actual.items():
            if start_from and name in NEEDED_TO_GO_ON:
                continue
            assert message.startswith("CheckpointError: "), (name, message)
            assert DAMAGES[name][1] in message, (name, message)
            assert name in message, (name, message)  # the folder's
            assert "weights_only" not in message, f"advises to run code: {message}"
            assert message.isprintable(), f"more than a line: {message!r}"
            assert not re.search(r"rank 1: .*on rank 0", message), message
            assert steps == 0, name


def _not_there(scratch: str, start_from: bool) -> dict[str, tuple[str, int]]:
    return _resume_each({"absent": f"{scratch}/absent.ckpt"}, start_from)


def test_a_checkpoint_that_is_not_there_is_reported_on_every_rank(tmp_path: Path) -> None:
    calls = {
        str(start_from): (_not_there, str(tmp_path), start_from) for start_from in (False, True)
    }
    for rank_results in run_each_on_ranks(calls, 2):
        for actual in rank_results.values():
            assert actual["absent"] == (
                f"MissingCheckpointError: there is no checkpoint {tmp_path}/absent.ckpt.",
                0,
            )


def _file_of_others(scratch: str) -> dict[str, tuple[str, int]]:
    kinds = {
        "no state_dict": {"model": {"x": torch.ones(2)}},
        "a list": [torch.ones(2)],
        "an object": {"state_dict": {}, "layer": torch.nn.GELU()},
    }
    paths = {name: f"{scratch}/{rank_and_num_ranks()[0]} {name}.ckpt" for name in kinds}
    for name, content in kinds.items():
        torch.save(content, paths[name])
    return _resume_each(paths, True)


def test_a_file_that_is_no_checkpoint_is_reported_as_one(tmp_path: Path) -> None:
    for actual in run_on_ranks(_file_of_others, 2, str(tmp_path)):
        for name, (message, steps) in actual.items():
            assert message.startswith("CheckpointError: "), (name, message)
            assert name in message
            assert steps == 0


# --------------------------------------------------------------------------------------------------
# links to the last


def _linked(scratch: str, fails: bool) -> dict[str, Any]:
    folder = _folder(scratch, f"{fails}")
    keep = ModelCheckpoint(
        folder,
        filename="{step}",
        monitor="score",
        mode="max",
        save_top_k=2,
        every_n_train_steps=4,
        save_last="link",
    )
    trainer, model = _trainer(False, keep), _model()
    broken = []

    def look() -> None:
        last = folder / "last.ckpt"
        if last.is_symlink() and not is_checkpoint(last):
            broken.append(model.steps)

    def before_third() -> None:
        if fails:
            _limit(1, TOO_LARGE["tensors"])

    model.at = {step: look for step in range(1, 15)} | {11: before_third}
    with _no_limit(), _slow(0.2):
        raised = _fit(trainer, model, 14)
    last = folder / "last.ckpt"
    return {
        "raised": raised,
        "names": _names_in_the_end(folder),
        "last": _step(last.resolve()),
        "is_link": last.is_symlink(),
        "broken": broken,
    }


@pytest.mark.parametrize(
    "fails", slow_except([True], [False, True]), ids=["all is well", "the third fails"]
)
def test_a_link_to_the_last_checkpoint_leads_to_a_complete_one(tmp_path: Path, fails: bool) -> None:
    for actual in run_on_ranks(_linked, 2, str(tmp_path), fails):
        assert actual["is_link"]
        assert actual["raised"].startswith("CheckpointError: ") == fails, actual
        retained = ["step=4.ckpt", "step=8.ckpt"] if fails else ["step=8.ckpt", "step=12.ckpt"]
        assert actual["names"] == sorted(["last.ckpt", *retained]), actual
        assert actual["last"] == (8 if fails else 12), actual
        assert actual["broken"] == [], (
            f"at these steps last.ckpt led to nothing: {actual['broken']}"
        )


# --------------------------------------------------------------------------------------------------------- refusals


def _refused(scratch: str) -> dict[str, Any]:
    actual = {}
    model = _model()
    actual["plugin"] = (_fit(_trainer(plugins=[AsyncCheckpointIO()]), model, 2), model.steps)
    model = _model()
    linked = ModelCheckpoint(f"{scratch}/links", save_last="link")
    actual["link"] = (_fit(_trainer(True, linked), model, 2), model.steps)
    for is_async in (False, True):
        trainer = _trainer(is_async)
        raised = _fit(
            trainer, _model({1: lambda t=trainer: t.save_checkpoint("s3://bucket/it.ckpt")}), 2
        )
        actual[f"s3 {is_async}"] = (raised, 0)
    trainer = _trainer()
    options = {"storage_options": lambda spec: None}
    raised = _fit(
        trainer, _model({1: lambda: trainer.save_checkpoint(f"{scratch}/it.ckpt", **options)}), 2
    )
    actual["storage_options"] = (raised, 0)
    actual["left"] = os.listdir(scratch)
    return actual


def test_what_belongs_to_other_storage_is_refused_with_the_way_out(tmp_path: Path) -> None:
    for actual in run_on_ranks(_refused, 2, str(tmp_path)):
        message, steps = actual["plugin"]
        assert message.startswith("ConfigError: plugins=AsyncCheckpointIO")
        assert "checkpoint={'async_save': True}" in message
        assert "checkpoint={'distributed': False}" in message
        assert steps == 0
        message, steps = actual["link"]
        assert message.startswith("ConfigError: ")
        assert "save_last='link'" in message
        assert "async_save" in message
        assert steps == 0
        for kind in ("s3 False", "s3 True"):
            assert actual[kind][0].startswith("ConfigError: s3://bucket/it.ckpt: ")
            assert "checkpoint={'distributed': False}" in actual[kind][0]
        assert actual["storage_options"][0].startswith(
            "ConfigError: storage_options belong to a CheckpointIO"
        )
        assert actual["left"] == []


class Colour(Enum):
    """No plain type."""

    RED = 1


class Level(int, Enum):
    """A number, and yet no plain type."""

    HIGH = 3


NOT_PLAIN: dict[str, Any] = {
    "datetime": datetime(2026, 1, 1),
    "enum": Colour.RED,
    "int enum": Level.HIGH,
    "array": numpy.zeros(2),
    "function": len,
    "slice": slice(1),
    "lock": threading.Lock(),
    "key": {Colour.RED: 1},
    "deep": {"a": [1, ({"b": datetime(2026, 1, 1)},)]},
}
PATHS = {"in": [PurePosixPath("/a"), (Path("b"),)]}
PLAIN: dict[str, Any] = {
    "numbers": (1, 1.5, True, None, 2**80, complex(1, 2)),
    "numpy numbers": (numpy.float32(0.5), numpy.int64(3), numpy.bool_(True)),
    "text": ("a", b"b", bytearray(b"c")),
    "paths": PATHS,
    "containers": [(1,), [2], {3: 4}, {5, 6}],
    "torch": (torch.ones(2), torch.float32, torch.Size((1, 2)), torch.device("cpu")),
}


class Remembers(pl.Callback):
    """Has a state. on: ranks that have it; others have None."""

    def __init__(self, held: Any, label: tuple[int, ...] = (0, 1)) -> None:
        self.held, self.on = held, label

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held if rank_and_num_ranks()[0] in self.on else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state["held"]


def _holds(scratch: str, names: list[str], is_async: bool, keep: bool) -> dict[str, Any]:
    """Save what a callback holds at step 2. keep: whether there is a ModelCheckpoint."""
    actual = {}
    for name in names:
        folder = _folder(scratch, f"{name} {keep}")
        callbacks: list[Any] = [Remembers((NOT_PLAIN | PLAIN)[name])]
        if keep:
            callbacks.append(ModelCheckpoint(folder, filename="it", every_n_train_steps=2))
        path, trainer, model = folder / "it.ckpt", _trainer(is_async, *callbacks), _model()
        if not keep:
            model.at = {2: lambda t=trainer, p=path: t.save_checkpoint(p)}
        raised = _fit(trainer, model, 3)
        actual[name] = (raised, model.steps, _step(path), _names(folder))
    return actual


@KINDS
def test_what_is_no_plain_type_is_refused_with_its_path_and_type(
    tmp_path: Path, is_async: bool
) -> None:
    calls = {
        str(keep): (_holds, str(tmp_path), list(NOT_PLAIN), is_async, keep)
        for keep in (False, True)
    }
    for rank_results in run_each_on_ranks(calls, 2):
        for keep in (False, True):
            for name, (messages, steps, saved, names) in rank_results[str(keep)].items():
                kind = type(NOT_PLAIN[name])
                place = {
                    "deep": "['held']['a'][1][0]['b'], a datetime.datetime,",
                    "key": "['held'], a ",
                }.get(name, f"['held'], a {kind.__module__}.{kind.__qualname__},")
                assert messages.startswith("CheckpointError: "), (name, messages)
                assert "Remembers" in messages, (name, messages)
                assert f"{place}" in messages, (name, messages)
                assert "is no plain type" in messages
                # Before training where checkpoints are going to be saved, else at the first save.
                assert (steps, saved, names) == (0 if keep else 2, 0, []), name


def _holds_again(scratch: str) -> dict[str, Any]:
    actual = {}
    for name, value in PLAIN.items():
        callback = Remembers(None)
        raised = _fit(
            _trainer(False, callback), _model(), 3, ckpt_path=f"{scratch}/{name} True/it.ckpt"
        )
        actual[name] = raised or _same(
            callback.held, {"in": ["/a", ("b",)]} if value is PATHS else value
        )
    return actual


def test_plain_types_of_all_kinds_are_saved_and_loaded(tmp_path: Path) -> None:
    calls = {
        "save": (_holds, str(tmp_path), list(PLAIN), False, True),
        "load": (_holds_again, str(tmp_path)),
    }
    for rank_results in run_each_on_ranks(calls, 2):
        assert {name: actual[0] for name, actual in rank_results["save"].items()} == dict.fromkeys(
            PLAIN, ""
        )
        assert rank_results["load"] == dict.fromkeys(PLAIN, True)


class WithHyperparameters(Model):
    """Saves all that it was given."""

    def __init__(self, rate: Any, when: Any, layers: Any, loss: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


SETTINGS = {"path": Path("data"), "host": IPv4Address("10.0.0.1")}
"""A path is read without pickles, too; an address is of no type that stands on the list."""


class WithSettings(WithHyperparameters):
    """Adds to checkpoints what is of no plain type, too."""

    read: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["settings"] = SETTINGS

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.read = checkpoint["settings"]


def _with_settings() -> WithSettings:
    torch.manual_seed(7)
    return WithSettings(0.5, datetime(2026, 1, 1), [1, 2], torch.nn.MSELoss())


def _pickles(scratch: str, options: dict[str, Any]) -> dict[str, Any]:
    path, checkpoint = Path(scratch) / "it.ckpt", {"pickles": True, **options}
    trainer, model = _trainer(checkpoint=checkpoint, max_steps=3), _with_settings()
    model.at = {2: lambda: model.trainer.save_checkpoint(path)}
    actual: dict[str, Any] = {"raised": _fit(trainer, model, 3), "losses": list(model.losses)}
    resumed = _with_settings()
    actual["resumed"] = _fit(
        _trainer(checkpoint=checkpoint, max_steps=3), resumed, 3, ckpt_path=path
    )
    actual |= {"losses again": resumed.losses, "read": resumed.read}
    actual["without"] = _fit(_trainer(max_steps=3), _with_settings(), 3, ckpt_path=path)
    if rank_and_num_ranks()[0] == 0:
        loaded = WithSettings.load_from_checkpoint(path, weights_only=False)
        actual["loaded"] = (
            loaded.hparams["when"],
            type(loaded.hparams["loss"]).__name__,
            loaded.read,
        )
    actual["saved without"] = _fit(_trainer(checkpoint={**options, "pickles": False}), model, 3)
    return actual


@pytest.mark.slow
def test_pickles_are_saved_and_loaded_where_they_are_asked_for(tmp_path: Path) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "folder": {},
        "file": {"distributed": False, "async_save": False},
    }
    for kind in kinds:
        (tmp_path / kind).mkdir()
    calls = {kind: (_pickles, str(tmp_path / kind), options) for kind, options in kinds.items()}
    for rank, rank_results in enumerate(run_each_on_ranks(calls, 2)):
        for actual in rank_results.values():
            assert actual["raised"] == actual["resumed"] == ""
            assert actual["losses again"] == actual["losses"][2:]
            assert actual["read"] == SETTINGS
            assert "CheckpointError" in actual["without"]
            assert "checkpoint: {pickles: true}, or by export --pickles" in actual["without"]
            assert "set checkpoint={'pickles': True} in the strategy" in actual["saved without"]
            if rank == 0:
                assert actual["loaded"] == (datetime(2026, 1, 1), "MSELoss", actual["read"])
    for kind in kinds:
        saved = tmp_path / kind / "it.ckpt"
        with pytest.raises(CheckpointError, match="or by export --pickles, if you trust it"):
            export(saved, tmp_path / f"{kind}.pt")
        with pytest.raises(CheckpointError, match="--pickles reads weights alone"):
            export(saved, tmp_path / f"{kind}.ckpt", pickles=True)
        export(saved, tmp_path / f"{kind}.pt", pickles=True)
        state = WithSettings.load_from_checkpoint(saved, weights_only=False).state_dict()
        exported = torch.load(tmp_path / f"{kind}.pt")
        assert list(exported) == list(state)
        assert all(torch.equal(exported[name], state[name]) for name in state)


# ------------------------------------------------------------------------------------------------
# ranks that differ


class Differs(Model):
    """Has a large buffer of another length on rank 1, and one that only rank 1 has."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        rank = rank_and_num_ranks()[0]
        self.register_buffer("seen", torch.full((10_000 + rank,), float(rank)))
        if rank:
            self.register_buffer("own", torch.full((10_000,), 5.0))


def _differs(scratch: str, is_async: bool) -> dict[str, Any]:
    path, trainer = Path(scratch) / f"{is_async}.ckpt", _trainer(is_async)
    torch.manual_seed(7)
    model = Differs({2: lambda: trainer.save_checkpoint(path)})
    raised = _fit(trainer, model, 3)
    return {"raised": raised, "path": str(path)}


def test_a_rank_whose_module_differs_neither_hangs_nor_spoils_the_checkpoint(
    tmp_path: Path,
) -> None:
    calls = {str(is_async): (_differs, str(tmp_path), is_async) for is_async in (False, True)}
    ranks = run_each_on_ranks(calls, 2)
    for kind in ("False", "True"):
        assert [rank_results[kind]["raised"] for rank_results in ranks] == ["", ""]
        state = _content(Path(ranks[0][kind]["path"]))[0]["state_dict"]
        assert state["seen"].shape == (10_000,)
        assert float(state["seen"].sum()) == 0.0


def _one_remembers(scratch: str, failing_rank: int, name: str) -> str:
    path, trainer, model = (
        Path(scratch) / "it.ckpt",
        _trainer(False, Remembers(NOT_PLAIN[name], (failing_rank,))),
        _model(),
    )
    model.at = {2: lambda: trainer.save_checkpoint(path)}
    return _fit(trainer, model, 3)


def test_what_only_one_rank_remembers_counts_where_it_is_rank_0(tmp_path: Path) -> None:
    calls = {
        str(failing_rank): (_one_remembers, str(tmp_path), failing_rank, "datetime")
        for failing_rank in (0, 1)
    }
    for rank_results in run_each_on_ranks(calls, 2):
        assert (
            "checkpoint['callbacks']['Remembers']['held'], a datetime.datetime,"
            in rank_results["0"]
        )
        assert rank_results["1"] == ""  # as in Lightning, what rank 0 has is saved
